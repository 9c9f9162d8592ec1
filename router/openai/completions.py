"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from router.openai.sampling import MAX_LOGPROBS, CommonFields

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(CommonFields):
    """A text completion request. The prompt is text or token ids; a list with one prompt is possible."""

    prompt: Any
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None
    """As in vLLM: false encodes the text without the tokenizer's own special tokens (BOS)."""

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: Any) -> str | tuple[int, ...]:
        if isinstance(value, list) and value and isinstance(value[0], str | list):
            if len(value) > 1:
                raise ValueError("several prompts in one request are not supported yet")
            value = value[0]
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or not all(type(token_id) is int for token_id in value):
            raise ValueError("must be a string or a list of token ids")
        if not value:
            raise ValueError("must not be empty")
        return tuple(value)
