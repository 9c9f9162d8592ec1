"""What a client asked for and what an engine answers, free of any transport."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from protocol.ids import RequestId

_SEED_MASK = (1 << 64) - 1


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request with several: choice i is the request of one choice
    with this seed. Choice 0 keeps the request's own; the others get SplitMix64's output number `index`.
    """
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & _SEED_MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _SEED_MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _SEED_MASK
    return mixed ^ (mixed >> 31)


class FinishReason(StrEnum):
    """Why a sequence ended; the values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Immutable, validated by the router, the same on every worker.

    The noise of a sampled token is a function of (`seed`, position) alone, so that a run that was
    split, preempted or resumed gives the tokens of an undisturbed one.
    """

    max_tokens: int
    """Upper bound of the output length in tokens, tokens of earlier legs included; >= 1."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    seed: int = 0
    """Unsigned 64 bit; the router draws one when the client gave none."""
    logprobs: int | None = None
    """None: no log-probabilities; n: the chosen token's and the n best ones'."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the sequence, besides the model's end-of-sequence tokens."""
    ignore_eos: bool = False
    min_tokens: int = 0
    """No end-of-sequence or stop token may be chosen before this many output tokens."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: int | None = None
    """As `logprobs`, for the tokens of the prompt; the first one has none. Bypasses the prefix cache."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that may not appear: the last token of one is banned after the rest of it."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request as the workers see it: token ids, never text."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    """Tokens already sent to the client by an earlier leg; they are followed, never repeated."""
    deadline_s: float = 600.0
    """Seconds that remain, relative to receipt: no clocks are compared across machines."""
    priority: int = 0
    """Smaller is served first."""
    cache_salt: str = ""
    """Prefix-cache blocks are shared only between requests with the same salt."""
    n: int = 1
    """Choices: independent continuations of the one prompt, with `choice_seed(sampling.seed, i)`."""
    index: int = 0
    """Number of the first choice. A choice that goes on by itself keeps its number, and
    `sampling.seed` is its own by then."""

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is there before the next one is sampled."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def num_blocks(self, block_size: int) -> int:
        """KV blocks to begin with: those of all tokens and the next one, of which each choice has a last
        block of its own. Router and decode worker reckon credit by it."""
        return self.num_tokens // block_size + self.n


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token."""

    token_id: int
    logprob: float | None = None
    """Natural log, of the distribution before temperature and filters; None when not asked for."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), best first."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """Where a request's time went, in seconds of the worker that measured it."""

    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_queue_s: float = 0.0
    fetch_s: float = 0.0
    fetched_bytes: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefill worker's prefix cache."""


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one engine step added to one choice of a request."""

    request_id: RequestId
    tokens: tuple[Token, ...] = ()
    finish_reason: FinishReason | None = None
    receipt: Receipt = field(default_factory=Receipt)
    index: int = 0
    """Which choice of the request."""
