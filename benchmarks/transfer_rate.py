"""How fast do KV blocks move over NIXL, against the best raw NIXL read of as many bytes?

The blocks lie scattered in both pools. The raw reads are of the same memory in few large pieces, or in
one: the best of them counts. All take turns. Rates are those of each one's fastest round, for what else the
machine does only ever makes a read slower; the ratio of the medians is told, too.
"""

from __future__ import annotations

from statistics import median

from block_shapes import BLOCK_SIZE, SHAPES, block_bytes
from figures import Figures
from raw_transfer import RawReader, memcpy_s, raw_readers
from rounds import Rounds

RAW_COUNTS = (1, 4, 16)
"""Pieces of the raw reads."""
MIB = 2**20


def measure(num_tokens: int, rounds: Rounds) -> Figures:
    figures: Figures = {}
    for name, shape in SHAPES.items():
        num_blocks = num_tokens // BLOCK_SIZE
        figures |= _measure(f"{name}_{num_tokens}", num_blocks, block_bytes(shape), rounds)
    return figures


def _measure(name: str, num_blocks: int, size: int, rounds: Rounds) -> Figures:
    total = num_blocks * size
    with raw_readers(total, (num_blocks, *RAW_COUNTS)) as readers:
        _round(readers, total, 0)  # connects
        taken = [_round(readers, total, i % len(readers)) for i in rounds]
    copy_s, ours_s, *raws_s = (min(seconds) for seconds in zip(*taken, strict=True))
    typical_s, *typical_raws_s = (median(seconds) for seconds in [*zip(*taken, strict=True)][1:])
    return {
        f"transfer_{name}_blocks": (total / MIB / ours_s, "MiB/s"),
        f"transfer_{name}_best_raw": (total / MIB / min(raws_s), "MiB/s"),
        f"transfer_{name}_memcpy": (total / MIB / copy_s, "MiB/s"),
        f"transfer_{name}_share_of_best_raw": (min(raws_s) / ours_s, "ratio"),
        f"transfer_{name}_share_of_best_raw_by_medians": (min(typical_raws_s) / typical_s, "ratio"),
    }


def _round(readers: list[RawReader], total: int, first: int) -> tuple[float, ...]:
    """Seconds of a memcpy, of the blocks, and of every raw read.

    Reader number `first` begins: what the one before left in the processor's cache helps the next one.
    """
    reads_s = [0.0] * len(readers)
    for i in (*range(first, len(readers)), *range(first)):
        reads_s[i] = readers[i].read_s(shuffled=i == 0)
    return memcpy_s(total), *reads_s
