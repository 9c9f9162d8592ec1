"""What asyncio and the engine thread tell each other, through two queues.

Commands are posted in any order and never fail by themselves; what comes of them are events. An id
that the engine does not know (any more) is ignored: the sender raced with the sequence's end.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import SplitserveError
from protocol.generation import FinishReason, SamplingParams, Token
from protocol.ids import BlockId, SequenceId


@dataclass(frozen=True, slots=True)
class AddSequence:
    """Queue a sequence for computing. Refused with `SequenceFailed` when it can never fit.

    A full queue refuses it with `Overloaded`, at once or, while it has got nothing yet, for the sake of one
    that outranks it. Whoever brings output tokens is not refused.
    """

    seq_id: SequenceId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    hold: bool = False
    """Keep the blocks after the next sampled token, until `ReleaseSequence` (prefill role)."""
    priority: int = 0
    cache_salt: str = ""
    index: int = 0
    """Number of the first choice: a choice that goes on alone keeps the one it had."""
    num_samples: int = 1
    """Choices that share the prompt's blocks; choice i has the seed `choice_seed(sampling.seed, i)`."""


FirstTokens = tuple[tuple[int, int], ...]
"""(choice, token that was sampled elsewhere) of every choice that goes on, in their order."""


@dataclass(frozen=True, slots=True)
class ReserveSequence:
    """Queue for blocks that hold all these tokens, to be filled from outside (decode role). No queue is
    too full for it: the router's credit bounds how many there are.

    Answered by `BlocksAllocated`; after that nobody but the sender writes those blocks (those past
    the cached prefix), until it says Admit, Recompute or Abort.
    """

    seq_id: SequenceId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    """Tokens of earlier legs, without the one that the prefill worker samples meanwhile."""
    priority: int = 0
    cache_salt: str = ""
    index: int = 0
    """Number of the first choice."""
    num_samples: int = 1
    """As in `AddSequence`."""


@dataclass(frozen=True, slots=True)
class AdmitSequence:
    """The reserved blocks hold validated KV: decode from the first tokens on.

    Choices without a first token ended with it, and are dropped. Fails (`SequenceFailed`) when a token
    is none of the reserved choices', or ends its choice by what this engine knows.
    """

    seq_id: SequenceId
    first_tokens: FirstTokens


@dataclass(frozen=True, slots=True)
class RecomputeSequence:
    """The reserved blocks hold nothing of worth, and no read into them is pending: compute locally, and
    go on from the first tokens.

    May come before `BlocksAllocated`; one that crossed it means nothing any more.
    """

    seq_id: SequenceId
    first_tokens: FirstTokens


@dataclass(frozen=True, slots=True)
class AbortSequence:
    """Drop a sequence in whatever state; its blocks are free again before the next step.

    No read into its blocks may be pending. Not answered.
    """

    seq_id: SequenceId
    index: int | None = None
    """One choice alone; the others go on. None: all of them."""


@dataclass(frozen=True, slots=True)
class ReleaseSequence:
    """Give up the blocks of a HELD sequence, or of a `hold` one that is not there yet. Not answered."""

    seq_id: SequenceId


@dataclass(frozen=True, slots=True)
class InvalidateCache:
    """No sequence that comes later hits what the prefix cache holds now. Answered by `CacheInvalidated`.

    Running sequences go on, and what they computed does not enter the cache under a stale name. `hold`
    ones that are not HELD yet start over, and so are told `BlocksAllocated` again: their readers would
    take stale KV into caches of their own.
    """

    seq_id: SequenceId
    """Of the answer; no sequence has it."""
    token_ids: tuple[int, ...] | None = None
    """The prefix whose blocks, and all that go on from them, are meant; None: everything."""
    cache_salt: str | None = None


Command = (
    AddSequence
    | ReserveSequence
    | AdmitSequence
    | RecomputeSequence
    | AbortSequence
    | ReleaseSequence
    | InvalidateCache
)


@dataclass(frozen=True, slots=True)
class BlocksAllocated:
    """A `hold` or reserved sequence has its blocks; they stay put until it is released or aborted."""

    seq_id: SequenceId
    block_ids: tuple[BlockId, ...]
    num_cached_tokens: int
    """Tokens at the start whose KV the prefix cache already gave; a multiple of the block size."""


@dataclass(frozen=True, slots=True)
class PrefillProgressed:
    """A `hold` sequence's KV is complete up to `num_computed` tokens, and may be read.

    All of them are told before `TokensSampled` at the latest.
    """

    seq_id: SequenceId
    num_computed: int


@dataclass(slots=True)
class TokensSampled:
    """New tokens of one sequence. With a `finish_reason` the sequence is gone and its blocks free.

    For a `hold` sequence without `finish_reason` this is the one token after which it is HELD.
    Nobody changes it; it is not frozen because one is made per sequence and step, and a frozen one
    takes six times as long to make.
    """

    seq_id: SequenceId
    tokens: tuple[Token, ...]
    finish_reason: FinishReason | None
    num_cached_tokens: int
    index: int = 0
    """Which choice; the sequence is gone when all its choices have ended."""


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of the prompt's next tokens; the very first token of a prompt has none.

    In order, and all of them before the sequence's first `TokensSampled`.
    """

    seq_id: SequenceId
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """The sequence is gone and its blocks are free."""

    seq_id: SequenceId
    error: SplitserveError


@dataclass(frozen=True, slots=True)
class CacheInvalidated:
    """What came before this event may carry what was forgotten; what comes after it does not."""

    seq_id: SequenceId
    """As the command named it."""
    stale_held: tuple[SequenceId, ...]
    """HELD sequences with such KV: whoever has not read it yet must not take it for valid."""


Event = (
    BlocksAllocated | PrefillProgressed | PromptScored | TokensSampled | SequenceFailed | CacheInvalidated
)
