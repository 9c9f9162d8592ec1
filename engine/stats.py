"""How busy is an engine, and what has it done so far?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.histogram import StepsSnapshot
from protocol.membership import Load


@dataclass(slots=True)
class EngineCounters:
    """What only ever grows; kept by the scheduler."""

    num_preemptions_recompute: int = 0
    num_preemptions_swap: int = 0
    swapped_in_blocks: int = 0
    swapped_out_blocks: int = 0
    copied_blocks: int = 0
    invalidated_blocks: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_transferred: int = 0
    generated_tokens: int = 0
    num_steps: int = 0

    @property
    def num_preemptions(self) -> int:
        return self.num_preemptions_recompute + self.num_preemptions_swap


class StepRecord(NamedTuple):
    """One computing step: seconds of its parts, and its size."""

    schedule_s: float = 0.0
    execute_s: float = 0.0
    apply_s: float = 0.0
    num_seqs: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A consistent snapshot, taken between two steps."""

    num_running: int = 0
    num_waiting: int = 0
    """Sequences that wait for blocks and have no KV."""
    num_swapped: int = 0
    """Sequences that wait for blocks while their KV is on the host."""
    num_held: int = 0
    num_reserving: int = 0
    """Sequences that wait for blocks to be filled from outside."""
    num_fetching: int = 0
    num_waiting_tokens: int = 0
    """Tokens that are still to be computed before their sequence can sample."""
    blocks_total: int = 0
    """Without the null block."""
    blocks_free: int = 0
    """Can be handed out now, evictable cached ones included."""
    blocks_cached: int = 0
    """In the prefix cache, referenced or evictable."""
    host_blocks_total: int = 0
    host_blocks_free: int = 0
    num_preemptions_recompute: int = 0
    num_preemptions_swap: int = 0
    swapped_in_blocks: int = 0
    swapped_out_blocks: int = 0
    copied_blocks: int = 0
    """Shared blocks that were copied because one of their owners went on."""
    invalidated_blocks: int = 0
    """Blocks that were taken out of the prefix cache by command."""
    prefix_queries_tokens: int = 0
    """Tokens that were looked up in the prefix cache, once per sequence."""
    prefix_hits_tokens: int = 0
    prompt_tokens_computed: int = 0
    """Tokens computed in prefill chunks, recomputed ones included."""
    prompt_tokens_cached: int = 0
    """Tokens taken from the prefix cache, at every admission."""
    prompt_tokens_transferred: int = 0
    """Tokens whose KV came from another worker."""
    generated_tokens: int = 0
    num_steps: int = 0
    """Steps that computed something."""
    last_schedule_s: float = 0.0
    """Seconds that the parts of the last computing step took."""
    last_execute_s: float = 0.0
    last_apply_s: float = 0.0
    last_num_seqs: int = 0
    """Sequences in the last computing step."""
    last_num_tokens: int = 0
    steps: StepsSnapshot = field(default_factory=StepsSnapshot)
    """All computing steps so far."""

    @property
    def num_preemptions(self) -> int:
        return self.num_preemptions_recompute + self.num_preemptions_swap

    @property
    def load(self) -> Load:
        """The same in the cluster's words."""
        return Load(
            num_running=self.num_running,
            num_waiting=self.num_waiting + self.num_swapped + self.num_reserving,
            num_held=self.num_held + self.num_fetching,
            num_waiting_tokens=self.num_waiting_tokens,
            blocks_total=self.blocks_total,
            blocks_free=self.blocks_free,
            blocks_cached=self.blocks_cached,
        )
