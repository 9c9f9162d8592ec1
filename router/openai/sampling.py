"""The fields that chat and text completions share, and the sampling parameters made of them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import Field, field_validator, model_validator

from protocol.errors import InvalidRequest
from protocol.generation import SamplingParams
from router.openai.parameters import Fields, refuse_extras, shortened

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1000
MAX_LOGPROBS = 20
MAX_TOKEN_LIST = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256

T = TypeVar("T")

Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100)]
"""A factor beyond these says nothing that these do not."""


class StreamOptions(Fields):
    """How a stream reports about itself."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Harmless: a padding against guessing lengths, which a client may not rely on."""
    continuous_usage_stats: bool | None = None


class CommonFields(Fields):
    """Everything but the prompt, the bound of the output, and how log-probabilities are asked for."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Any = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_TOKEN_LIST)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_TOKEN_LIST)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    """Choices; the server bounds them."""
    bad_words: (
        Annotated[
            list[Annotated[str, Field(max_length=MAX_BAD_WORD_CHARACTERS)]], Field(max_length=MAX_BAD_WORDS)
        ]
        | None
    ) = None
    """As in vLLM: texts that the output may not contain."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """As in vLLM: the answer carries the log-probabilities of the prompt's tokens."""
    return_token_ids: bool | None = None
    """As in vLLM: choices carry the ids of their tokens."""

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: Any) -> Any:
        if value is None:
            return value
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
            raise ValueError("must be a string or a list of strings")
        if len(strings) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings are possible")
        if not all(0 < len(s) <= MAX_STOP_CHARACTERS for s in strings):
            raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters")
        return value

    @field_validator("bad_words")
    @classmethod
    def _check_bad_words(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and not all(word.strip() for word in value):
            raise ValueError("a bad word needs a character that is no space")
        return value

    @model_validator(mode="after")
    def _check_stream(self) -> CommonFields:
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs is not possible with stream: true",
                param="prompt_logprobs",
                code="invalid_value",
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is possible only with stream: true",
                param="stream_options",
                code="invalid_value",
            )
        if self.stream_options is not None:
            refuse_extras(self.stream_options.model_extra or {}, "stream_options.")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


def sampling_params(
    fields: CommonFields,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    bad_words: tuple[tuple[int, ...], ...],
    vocab_size: int,
) -> SamplingParams:
    """The engine's view of the fields; a seed is drawn when the client gave none.

    Raises `InvalidRequest` for what can be judged only with `max_tokens` or the vocabulary known.
    """
    if fields.min_tokens is not None and fields.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens ({shortened(str(fields.min_tokens))}) is above the output's bound of"
            f" {max_tokens} tokens",
            param="min_tokens",
            code="invalid_value",
        )
    stop_token_ids = tuple(fields.stop_token_ids or ())
    check_token_ids(stop_token_ids, vocab_size, "stop_token_ids")
    _refuse_total_ban(fields, stop_token_ids, bad_words, vocab_size)
    seed = secrets.randbits(64) if fields.seed is None else fields.seed % 2**64
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(fields.temperature, 1.0),
        top_p=_or(fields.top_p, 1.0),
        top_k=max(_or(fields.top_k, 0), 0),
        min_p=_or(fields.min_p, 0.0),
        seed=seed,
        logprobs=logprobs,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(fields.ignore_eos),
        min_tokens=_or(fields.min_tokens, 0),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        repetition_penalty=_or(fields.repetition_penalty, 1.0),
        logit_bias=_logit_bias(fields.logit_bias or {}, vocab_size),
        prompt_logprobs=prompt_logprobs,
        bad_words=bad_words,
    )


def _refuse_total_ban(
    fields: CommonFields,
    stop_token_ids: tuple[int, ...],
    bad_words: tuple[tuple[int, ...], ...],
    vocab_size: int,
) -> None:
    """Raise `InvalidRequest` when no token would be left to begin with."""
    banned = {word[0] for word in bad_words if len(word) == 1}
    if fields.min_tokens:
        banned.update(stop_token_ids)
    if len(banned) >= vocab_size:
        raise InvalidRequest(
            "stop_token_ids with min_tokens, and bad_words, ban the whole vocabulary",
            param="bad_words" if fields.bad_words else "stop_token_ids",
            code="invalid_value",
        )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _logit_bias(biases: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    found: dict[int, float] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequest(
                "the keys of logit_bias must be token ids", param="logit_bias", code="invalid_value"
            )
        if int(key) in found:
            raise InvalidRequest(
                f"logit_bias names token {int(key)} twice", param="logit_bias", code="invalid_value"
            )
        found[int(key)] = float(bias)
    check_token_ids(tuple(found), vocab_size, "logit_bias")
    return tuple(sorted(found.items()))


def check_token_ids(token_ids: tuple[int, ...], vocab_size: int, param: str) -> None:
    """Raise `InvalidRequest` unless all ids are in the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        bad = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise InvalidRequest(
            f"{param}: token id {shortened(str(bad))} is not in the vocabulary of {vocab_size} tokens",
            param=param,
            code="invalid_value",
        )


def bound_output(asked: int | None, default: int | None, num_prompt_tokens: int, max_model_len: int) -> int:
    """How many tokens the output may have: what was asked for, else the default, else all that fit.

    Raises `InvalidRequest` (context_length_exceeded) when that does not fit behind the prompt.
    """
    room = max_model_len - num_prompt_tokens
    wanted = asked if asked is not None else min(default or room, room)
    if room < 1 or wanted > room:
        asked_text = f" and {shortened(str(asked))} tokens of output" if asked is not None else ""
        raise InvalidRequest(
            f"this model's context is {max_model_len} tokens; {num_prompt_tokens} tokens of"
            f" prompt{asked_text} do not fit",
            param="max_tokens" if asked is not None and room >= 1 else None,
            code="context_length_exceeded",
        )
    return wanted
