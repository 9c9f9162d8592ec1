"""What bounds the scheduler?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.policy import POLICIES
from protocol.errors import StartupError

PREEMPTIONS = ("recompute", "swap")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one engine. Raises `StartupError` when they contradict each other."""

    num_blocks: int
    """Blocks of the KV pool, the null block included."""
    max_model_len: int
    """Upper bound of prompt + output of a sequence, in tokens."""
    block_size: int = 16
    """Tokens per block."""
    max_num_seqs: int = 256
    """Sequences that run or are being fetched at the same time."""
    max_num_batched_tokens: int = 2048
    """Tokens that one step computes, over all sequences."""
    max_num_prefill_tokens: int | None = None
    """Tokens of a step that may go to others than decodes; None: all that the decodes leave.

    Bounds what local recompute on a decode worker costs the others in inter-token latency.
    """
    max_num_waiting: int = 1024
    """Sequences that may wait to be computed here; the next one is refused with `Overloaded`, or takes the
    place of one that it outranks and that has got nothing yet.

    Reserved ones are neither counted nor refused, nor are resumed ones refused: their clients have tokens
    already, or will in a moment. What bounds them is the credit that routers spend on each.
    """
    overload_retry_after_s: float = 1.0
    """What a refused sender is told to wait."""
    enable_prefix_caching: bool = True
    low_watermark: float = 0.01
    """Share of the blocks that an admission leaves free for the growth of those that run."""
    high_watermark: float = 0.04
    """Once fewer than the low watermark are free, nobody is admitted beside others until so many are."""
    policy: str = "fcfs"
    """Name of the scheduling policy: fcfs, priority or shortest_first."""
    ageing_tokens: int = 32
    """shortest_first: so many tokens less must each later arrival have to do, to overtake."""
    preemption: str = "recompute"
    """What becomes of the KV of a sequence that gives its blocks up: recompute or swap."""
    num_host_blocks: int = 0
    """Blocks of the host pool for swapping. A sequence for which it has no room is recomputed."""
    long_prefill_token_threshold: int = 0
    """A longer prefill computes at most so many tokens per step while others could use the rest; 0 is no
    bound."""

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_num_waiting",
            "ageing_tokens",
        ):
            _require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}: set it to at least 1")
        _require(
            self.num_blocks >= 2,
            f"the KV pool has {self.num_blocks} blocks and needs at least 2 (one is the null block): "
            "give it more memory",
        )
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
            f"({self.max_num_seqs}), so a full batch could not decode: raise it or lower max_num_seqs",
        )
        _require(
            self.max_num_prefill_tokens is None or self.max_num_prefill_tokens >= 1,
            f"max_num_prefill_tokens is {self.max_num_prefill_tokens}: "
            "set it to at least 1 or leave it out",
        )
        for name in ("num_host_blocks", "long_prefill_token_threshold"):
            _require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}: set it to at least 0")
        self._check_watermarks()
        _require(
            self.overload_retry_after_s > 0,
            f"overload_retry_after_s is {self.overload_retry_after_s}: set it to more than 0",
        )
        _require(
            self.policy in POLICIES,
            f"policy {self.policy!r} is unknown: choose one of {', '.join(sorted(POLICIES))}",
        )
        _require(
            self.preemption in PREEMPTIONS,
            f"preemption {self.preemption!r} is unknown: choose one of {', '.join(PREEMPTIONS)}",
        )

    def _check_watermarks(self) -> None:
        low, high = self.low_watermark, self.high_watermark
        _require(0 <= low < 1, f"low_watermark is {low}: set it to a share in [0, 1)")
        _require(0 <= high < 1, f"high_watermark is {high}: set it to a share in [0, 1)")
        _require(low <= high, f"high_watermark ({high}) is below low_watermark ({low}): raise it")

    @property
    def num_usable_blocks(self) -> int:
        """Blocks without the null block."""
        return self.num_blocks - 1

    @property
    def num_low_blocks(self) -> int:
        return math.ceil(self.low_watermark * self.num_usable_blocks)

    @property
    def num_high_blocks(self) -> int:
        return math.ceil(self.high_watermark * self.num_usable_blocks)

    def prefill_budget(self, num_decodes: int) -> int:
        """How many tokens a step has for others than its decodes."""
        budget = self.max_num_batched_tokens - num_decodes
        limit = self.max_num_prefill_tokens
        return budget if limit is None else min(budget, limit)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks the KV of `num_tokens` tokens takes."""
        return -(-num_tokens // self.block_size)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise StartupError(message)
