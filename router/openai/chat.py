"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from protocol.errors import InvalidRequest
from router.openai.parameters import Fields, refuse_extras, shortened
from router.openai.sampling import MAX_LOGPROBS, CommonFields

_IGNORED_WHEN_EMPTY = frozenset(
    {"annotations", "audio", "function_call", "reasoning", "refusal", "tool_calls"}
)
"""Fields of answers that clients send back; they mean nothing while they are empty."""


class ChatMessage(Fields):
    """One message; content is text, or a list of parts that are all text."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Any
    name: str | None = None
    reasoning_content: str | None = None

    @field_validator("content")
    @classmethod
    def _check_content(cls, value: Any) -> Any:
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or not value:
            raise ValueError("must be a string or a list of text parts")
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                raise ValueError(f"parts of type {shortened(repr(kind))} are not supported, only text")
            if type(part.get("text")) is not str:
                raise ValueError("a text part needs a string in its field text")
        return value

    def as_template_input(self) -> dict[str, str]:
        """What the chat template gets: absent fields left out, text parts joined by line breaks."""
        parts = [self.content] if isinstance(self.content, str) else [p["text"] for p in self.content]
        message = {"role": self.role, "content": "\n".join(parts)}
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        return message


class ChatRequest(CommonFields):
    """A chat completion request."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of the same; wins over the older one."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """As in vLLM: variables for the template, `enable_thinking` for example."""

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest(
                "top_logprobs is possible only with logprobs: true",
                param="top_logprobs",
                code="invalid_value",
            )
        for at, message in enumerate(self.messages):
            extras = {
                name: value
                for name, value in (message.model_extra or {}).items()
                if value or name not in _IGNORED_WHEN_EMPTY
            }
            refuse_extras(extras, f"messages[{at}].")
        return self

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
