"""The body of POST /reset_prefix_cache."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from protocol.errors import InvalidRequest
from router.openai.parameters import Fields


class ResetRequest(Fields):
    """What to forget: a prompt's blocks and all that go on from them; without a prompt, everything."""

    prompt: Any = None
    """Text or token ids, as in a completion request."""
    add_special_tokens: bool | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    """Whose blocks, when requests carry salts."""

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: Any) -> str | tuple[int, ...] | None:
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list) or not all(type(token_id) is int for token_id in value):
            raise ValueError("must be a string or a list of token ids")
        return tuple(value)

    @model_validator(mode="after")
    def _check_salt(self) -> ResetRequest:
        if self.prompt is None and self.cache_salt is not None:
            raise InvalidRequest(
                "cache_salt is possible only with a prompt", param="cache_salt", code="invalid_value"
            )
        return self
