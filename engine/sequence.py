"""One request's state inside one engine.

The scheduler owns and mutates it; the runner reads it during `execute`, on the same thread.
A sequence has no phase: every step just lets `num_computed` chase `len(token_ids)`.

    WAITING --blocks--> RUNNING --finished--> gone
       ^                   |  \\--first token of a `hold` sequence--> HELD --release--> gone
       +---- preempted ----+
    RESERVING --blocks--> FETCHING --admit--> RUNNING
                             \\--recompute--> WAITING
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from protocol.generation import SamplingParams
from protocol.ids import BlockId, SequenceId


class SequenceState(StrEnum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"
    RESERVING = "reserving"
    FETCHING = "fetching"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, progress and blocks of one sequence. Compared by identity."""

    seq_id: SequenceId
    sampling: SamplingParams
    token_ids: list[int]
    """Prompt, then every output token, those of earlier legs included."""
    num_prompt_tokens: int
    hold: bool = False
    """Stop after the next sampled token and keep the blocks until `ReleaseSequence`."""
    priority: int = 0
    cache_salt: str = ""
    arrival_s: float = 0.0
    state: SequenceState = SequenceState.WAITING
    num_computed: int = 0
    """Tokens whose KV is in `block_table`."""
    num_cached: int = 0
    """Tokens of the prompt that the prefix cache gave at the first admission."""
    block_table: list[BlockId] = field(default_factory=list)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.num_computed
