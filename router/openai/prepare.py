"""From a validated body to the request that the workers get: tokenised once, bounded, complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from protocol.errors import InvalidRequest, NotFound
from protocol.generation import GenerationRequest
from protocol.ids import RequestId
from router.answers import TextRequest
from router.openai.chat import ChatRequest
from router.openai.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from router.openai.sampling import CommonFields, bound_output, check_token_ids, sampling_params
from router.tokenizer import Tokenizer

LONG_TEXT_CHARACTERS = 8192
"""Longer texts are tokenised in a thread, so that nobody's stream waits for that."""


@dataclass(frozen=True, slots=True)
class Preparer:
    """Knows the model that requests are prepared for."""

    tokenizer: Tokenizer
    served_model_name: str
    max_model_len: int

    async def chat(self, fields: ChatRequest, request_id: RequestId, timeout_s: float) -> TextRequest:
        """Raises `InvalidRequest` or `NotFound`."""
        self.check_model(fields.model)
        messages = [message.as_template_input() for message in fields.messages]
        variables = fields.chat_template_kwargs
        prompt = await _encoded(
            lambda: self.tokenizer.encode_chat(messages, variables),
            sum(len(message["content"]) for message in messages),
        )
        max_tokens = bound_output(fields.asked_tokens, None, len(prompt), self.max_model_len)
        return self._request(
            fields,
            request_id,
            prompt,
            max_tokens=max_tokens,
            logprobs=fields.num_logprobs,
            timeout_s=timeout_s,
        )

    async def completion(
        self, fields: CompletionRequest, request_id: RequestId, timeout_s: float
    ) -> TextRequest:
        """Raises `InvalidRequest` or `NotFound`."""
        self.check_model(fields.model)
        text = fields.prompt
        if isinstance(text, str):
            adds_special = fields.add_special_tokens is not False
            prompt = await _encoded(lambda: self.tokenizer.encode(text, adds_special), len(text))
        else:
            prompt = text
        if not prompt:
            raise InvalidRequest(
                "prompt: must have at least one token", param="prompt", code="invalid_value"
            )
        max_tokens = bound_output(fields.max_tokens, DEFAULT_MAX_TOKENS, len(prompt), self.max_model_len)
        return self._request(
            fields, request_id, prompt, max_tokens=max_tokens, logprobs=fields.logprobs, timeout_s=timeout_s
        )

    def check_model(self, model: str) -> None:
        """Raise `NotFound` unless `model` is the one that is served."""
        if model != self.served_model_name:
            raise NotFound(
                f"the model {model!r} does not exist here; there is {self.served_model_name!r}",
                param="model",
                code="model_not_found",
            )

    def _request(
        self,
        fields: CommonFields,
        request_id: RequestId,
        prompt: tuple[int, ...],
        *,
        max_tokens: int,
        logprobs: int | None,
        timeout_s: float,
    ) -> TextRequest:
        # Text, too: a tokenizer may know more tokens than the model has rows for.
        check_token_ids(prompt, self.tokenizer.vocab_size, "prompt")
        generation = GenerationRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=sampling_params(fields, max_tokens, logprobs, self.tokenizer.vocab_size),
            deadline_s=timeout_s,
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt or "",
        )
        return TextRequest(generation, fields.stop_strings)


async def _encoded(encode: Callable[[], tuple[int, ...]], num_characters: int) -> tuple[int, ...]:
    return await asyncio.to_thread(encode) if num_characters > LONG_TEXT_CHARACTERS else encode()
