"""One request's state inside one engine.

The scheduler owns and mutates it; the runner reads it during `execute`, on the same thread.
A sequence has no phase: every step just lets `num_computed` chase `len(token_ids)`.

    WAITING --blocks--> RUNNING --finished--> gone
       ^                |  |  \\--first token of a `hold` sequence--> HELD --release--> gone
       +--- preempted --+  +--preempted by swap--> SWAPPED --blocks--> RUNNING
    RESERVING --blocks--> FETCHING --admit with first tokens--> RUNNING
        \\--recompute--------+--recompute with first tokens--> WAITING

Several choices of one request are one sequence until they part: the first one carries the others, which
have no state and no blocks, in `siblings` or `branches`. Born, each is a sequence of its own that shares
the first one's blocks; a block that two would write is copied first.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import StrEnum

from engine.bad_words import NO_BAD_WORDS, BadWords
from engine.prefix_hash import BlockKey
from protocol.generation import SamplingParams
from protocol.ids import BlockId, HostBlockId, SequenceId


class SequenceState(StrEnum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
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
    """Tokens of the prompt that the prefix cache gave, and that were not computed here after all."""
    block_table: list[BlockId] = field(default_factory=list)
    num_given_tokens: int = 0
    """How many of `token_ids` were sampled elsewhere, or are the prompt."""
    arrival_index: int = 0
    """Counts up over the engine's life; no two sequences share one."""
    length_limit: int = sys.maxsize
    """`len(token_ids)` at which the sequence ends."""
    min_length: int = 0
    """`len(token_ids)` before which no token ends the sequence."""
    stop_token_ids: frozenset[int] = frozenset()
    """Every token that ends the sequence, the model's end-of-sequence tokens among them."""
    was_admitted: bool = False
    """It had blocks before."""
    block_keys: list[BlockKey] = field(default_factory=list)
    """Names of the first full blocks, as far as they were needed."""
    num_registered_blocks: int = 0
    """Blocks of `block_table` that were offered to the prefix cache or came from it."""
    index: int = 0
    """Which choice of its request it is; choices share `seq_id` and `arrival_index`."""
    indices: range = range(1)
    """Of all choices with which its request came, whatever became of them."""
    siblings: list[Sequence] = field(default_factory=list)
    """Unborn choices that part at the next token, sampled here or elsewhere: the same tokens so far."""
    branches: list[Sequence] = field(default_factory=list)
    """Unborn choices that parted at the last token: all tokens but that one are the same."""
    host_table: list[HostBlockId] = field(default_factory=list)
    """Where the KV of `num_computed` tokens is while it is SWAPPED."""
    is_stale: bool = False
    """The cache was invalidated under its blocks: until it starts over it neither gives nor takes there."""
    num_scored: int = 0
    """Prompt positions whose following token's log-probability was told or is not wanted."""
    bad_words: BadWords = NO_BAD_WORDS
    """Those of `sampling`, which the choices of a request have in common."""

    def __post_init__(self) -> None:
        if self.sampling.bad_words and self.bad_words is NO_BAD_WORDS:
            self.bad_words = BadWords(self.sampling.bad_words)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def has_sampled(self) -> bool:
        """Tokens were sampled here."""
        return len(self.token_ids) > self.num_given_tokens

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def has_kv(self) -> bool:
        """KV of its tokens was computed already, here or elsewhere."""
        return self.state is not SequenceState.WAITING

    @property
    def num_unborn(self) -> int:
        return len(self.siblings) + len(self.branches)

    @property
    def num_unscored(self) -> int:
        """Prompt positions that must still be computed, not taken from the cache, to be scored."""
        return self.num_prompt_tokens - 1 - self.num_scored
