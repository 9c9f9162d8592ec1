"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from protocol.errors import InvalidRequest
from router.openai.sampling import MAX_LOGPROBS, CommonFields

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256

Prompt = str | tuple[int, ...]


class CompletionRequest(CommonFields):
    """A text completion request."""

    prompt: Any
    """A tuple of prompts after validation, each text or token ids; clients may give one without a list."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """0 is possible with `echo`: the prompt is scored and nothing is generated."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    """The answer begins with the prompt, its log-probabilities included."""
    add_special_tokens: bool | None = None
    """As in vLLM: false encodes the text without the tokenizer's own special tokens (BOS)."""

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: Any) -> tuple[Prompt, ...]:
        if isinstance(value, list) and value and isinstance(value[0], str | list):
            if len(value) > MAX_PROMPTS:
                raise ValueError(f"at most {MAX_PROMPTS} prompts are possible")
            return tuple(map(_checked, value))
        return (_checked(value),)

    @model_validator(mode="after")
    def _check_max_tokens(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest(
                "max_tokens must be at least 1 without echo: true", param="max_tokens", code="invalid_value"
            )
        return self

    @property
    def is_scoring(self) -> bool:
        return self.max_tokens == 0

    @property
    def num_prompt_logprobs(self) -> int | None:
        """For how many best tokens of each prompt position the workers are asked; None: not at all."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in asked if number is not None), default=None)


def _checked(value: Any) -> Prompt:
    """One prompt. Raises `ValueError`."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(type(token_id) is int for token_id in value):
        raise ValueError("must be a string or a list of token ids, or a list of such prompts")
    if not value:
        raise ValueError("must not be empty")
    return tuple(value)
