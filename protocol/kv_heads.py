"""Which KV heads does each rank of a worker hold? A contract: who reads a rank's blocks relies on it."""

from __future__ import annotations

from itertools import pairwise


def split(total: int, num_parts: int) -> tuple[range, ...]:
    """Cut `range(total)` into neighbours; sizes differ by one at most, and the larger ones come first."""
    size, num_larger = divmod(total, num_parts)
    starts = [part * size + min(part, num_larger) for part in range(num_parts + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def kv_head_ranges(num_kv_heads: int, num_ranks: int) -> tuple[range, ...]:
    """The KV heads of each rank, in the order of ranks.

    Each head has one rank while there are enough heads; else each rank has one head, which neighbouring
    ranks hold alike.
    """
    if num_kv_heads >= num_ranks:
        return split(num_kv_heads, num_ranks)
    holders = split(num_ranks, num_kv_heads)
    return tuple(range(head, head + 1) for head, ranks in enumerate(holders) for _ in ranks)
