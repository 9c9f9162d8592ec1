"""Which part of a model's KV does each rank of a worker hold? A contract: readers of its blocks rely on it.

rank      = stage * tensor_parallel_size + its place in the stage; rank 0 is the leader
a stage   has neighbouring layers; within it, neighbouring KV heads are dealt out to its ranks
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How one worker's model is dealt out to ranks."""

    tensor_parallel_size: int = 1
    """Ranks that share each layer."""
    pipeline_parallel_size: int = 1
    """Stages, each with layers of its own."""

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def stage_of(self, rank: int) -> int:
        return rank // self.tensor_parallel_size

    def place_of(self, rank: int) -> int:
        """Within its stage."""
        return rank % self.tensor_parallel_size


@dataclass(frozen=True, slots=True)
class KvPart:
    """What a rank's blocks hold, of all layers and KV heads of the model."""

    layers: range
    heads: range


def kv_parts(num_layers: int, num_kv_heads: int, layout: RankLayout) -> tuple[KvPart, ...]:
    """Of each rank, in order."""
    stages = split(num_layers, layout.pipeline_parallel_size)
    heads = kv_head_ranges(num_kv_heads, layout.tensor_parallel_size)
    return tuple(KvPart(layers, mine) for layers in stages for mine in heads)


def split(total: int, num_parts: int) -> tuple[range, ...]:
    """Cut `range(total)` into neighbours; sizes differ by one at most, and the larger ones come first."""
    size, num_larger = divmod(total, num_parts)
    starts = [part * size + min(part, num_larger) for part in range(num_parts + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def kv_head_ranges(num_kv_heads: int, num_ranks: int) -> tuple[range, ...]:
    """The KV heads of each rank of a stage, in the order of ranks.

    Each head has one rank while there are enough heads; else each rank has one head, which neighbouring
    ranks hold alike.
    """
    if num_kv_heads >= num_ranks:
        return split(num_kv_heads, num_ranks)
    holders = split(num_ranks, num_kv_heads)
    return tuple(range(head, head + 1) for head, ranks in enumerate(holders) for _ in ranks)
