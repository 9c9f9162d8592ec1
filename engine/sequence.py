"""One request's state inside one engine.

The scheduler owns and mutates it; the runner reads it during `execute`, on the same thread.
A sequence has no phase: every step just lets `num_computed` chase `len(token_ids)`.

    WAITING --blocks--> RUNNING --finished--> gone
       ^                   |  \\--first token of a `hold` sequence--> HELD --release--> gone
       +---- preempted ----+
    RESERVING --blocks--> FETCHING --admit--> RUNNING
        \\--recompute--------+--recompute--> WAITING
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import StrEnum

from engine.prefix_hash import BlockKey
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
    arrival_index: int = 0
    """Counts up over the engine's life; no two sequences share one."""
    length_limit: int = sys.maxsize
    """`len(token_ids)` at which the sequence ends."""
    min_length: int = 0
    """`len(token_ids)` before which no token ends the sequence."""
    stop_token_ids: frozenset[int] = frozenset()
    """Every token that ends the sequence, the model's end-of-sequence tokens among them."""
    was_admitted: bool = False
    """It had blocks before: `num_cached` is settled."""
    block_keys: list[BlockKey] = field(default_factory=list)
    """Names of the first full blocks, as far as they were needed."""
    num_registered_blocks: int = 0
    """Blocks of `block_table` that were offered to the prefix cache or came from it."""

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.num_computed
