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
from router.openai.completions import DEFAULT_MAX_TOKENS, CompletionRequest, Prompt
from router.openai.parameters import shortened
from router.openai.sampling import CommonFields, bound_output, check_token_ids, sampling_params
from router.tokenizer import LONG_TEXT_CHARACTERS, Tokenizer

MAX_PROMPT_SCORES = 200_000
"""They cross the wire in one message, whose reading holds everybody else up for a fraction of a second."""


@dataclass(frozen=True, slots=True)
class Preparer:
    """Knows the model that requests are prepared for."""

    tokenizer: Tokenizer
    served_model_name: str
    max_model_len: int
    max_num_choices: int

    async def chat(self, fields: ChatRequest, request_id: RequestId, timeout_s: float) -> TextRequest:
        """Raises `InvalidRequest` or `NotFound`."""
        self.check_model(fields.model)
        messages = [message.as_template_input() for message in fields.messages]
        variables = fields.chat_template_kwargs
        prompt = await _apart_if_long(
            lambda: self._encode(self.tokenizer.render_chat(messages, variables), False, "messages"),
            len(repr(variables)) + sum(len(text) for message in messages for text in message.values()),
        )
        check_token_ids(prompt, self.tokenizer.vocab_size, "messages")
        max_tokens = bound_output(fields.asked_tokens, None, len(prompt), self.max_model_len)
        generation = self._generation(
            fields,
            request_id,
            prompt,
            max_tokens=max_tokens,
            logprobs=fields.num_logprobs,
            prompt_logprobs=fields.prompt_logprobs,
            timeout_s=timeout_s,
        )
        return TextRequest(generation, fields.stop_strings)

    async def completions(
        self, fields: CompletionRequest, new_request_id: Callable[[], RequestId], timeout_s: float
    ) -> list[TextRequest]:
        """A request for each of the body's prompts. Raises `InvalidRequest` or `NotFound`."""
        self.check_model(fields.model)
        requests = []
        for prompt in fields.prompt:
            requests.append(await self._completion(fields, prompt, new_request_id(), timeout_s))
            await asyncio.sleep(0)  # many prompts in tokenising hold up no stream
        return requests

    async def _completion(
        self, fields: CompletionRequest, asked_prompt: Prompt, request_id: RequestId, timeout_s: float
    ) -> TextRequest:
        prompt = await self.prompt(asked_prompt, fields.add_special_tokens is not False)
        asked = 1 if fields.is_scoring else fields.max_tokens
        generation = self._generation(
            fields,
            request_id,
            prompt,
            max_tokens=bound_output(asked, DEFAULT_MAX_TOKENS, len(prompt), self.max_model_len),
            logprobs=fields.logprobs,
            prompt_logprobs=fields.num_prompt_logprobs,
            timeout_s=timeout_s,
        )
        echo = self._text_of(asked_prompt) if fields.echo else None
        return TextRequest(generation, fields.stop_strings, echo, fields.is_scoring)

    async def prompt(self, prompt: str | tuple[int, ...], adds_special: bool) -> tuple[int, ...]:
        """The token ids of a prompt, at least one. Raises `InvalidRequest`."""
        if isinstance(prompt, str):
            text = prompt
            prompt = await _apart_if_long(lambda: self._encode(text, adds_special, "prompt"), len(text))
        if not prompt:
            raise InvalidRequest(
                "prompt: must have at least one token", param="prompt", code="invalid_value"
            )
        # Text, too: a tokenizer may know more tokens than the model has rows for.
        check_token_ids(prompt, self.tokenizer.vocab_size, "prompt")
        return prompt

    def _encode(self, text: str, adds_special: bool, param: str) -> tuple[int, ...]:
        """Raises `InvalidRequest`, without tokenising, for a text that is too long however it is split."""
        if len(text) > self.max_model_len * self.tokenizer.longest_token:
            raise InvalidRequest(
                f"this model's context is {self.max_model_len} tokens; a prompt of {len(text)} characters"
                " does not fit",
                param=param,
                code="context_length_exceeded",
            )
        return self.tokenizer.encode(text, adds_special)

    def _text_of(self, prompt: str | tuple[int, ...]) -> str:
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)

    def check_model(self, model: str) -> None:
        """Raise `NotFound` unless `model` is the one that is served."""
        if model != self.served_model_name:
            raise NotFound(
                f"the model {shortened(repr(model))} does not exist here;"
                f" there is {self.served_model_name!r}",
                param="model",
                code="model_not_found",
            )

    def _generation(
        self,
        fields: CommonFields,
        request_id: RequestId,
        prompt: tuple[int, ...],
        *,
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
        timeout_s: float,
    ) -> GenerationRequest:
        num_choices = 1 if fields.n is None else fields.n
        if num_choices > self.max_num_choices:
            raise InvalidRequest(
                f"n: at most {self.max_num_choices} choices are possible", param="n", code="invalid_value"
            )
        _check_scores(len(prompt), prompt_logprobs)
        words = [ids for word in fields.bad_words or () for ids in self.tokenizer.encode_bad_word(word)]
        sampling = sampling_params(
            fields,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            bad_words=tuple(dict.fromkeys(words)),
            vocab_size=self.tokenizer.vocab_size,
        )
        return GenerationRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=sampling,
            deadline_s=timeout_s,
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt or "",
            n=num_choices,
        )


def _check_scores(num_prompt_tokens: int, prompt_logprobs: int | None) -> None:
    num_scores = 0 if prompt_logprobs is None else num_prompt_tokens * (1 + prompt_logprobs)
    if num_scores > MAX_PROMPT_SCORES:
        raise InvalidRequest(
            f"{num_scores} log-probabilities of the prompt are more than the {MAX_PROMPT_SCORES} that are"
            " possible: ask for fewer best tokens, or score a shorter prompt",
            param="prompt_logprobs",
            code="invalid_value",
        )


async def _apart_if_long(encode: Callable[[], tuple[int, ...]], num_characters: int) -> tuple[int, ...]:
    return await asyncio.to_thread(encode) if num_characters > LONG_TEXT_CHARACTERS else encode()
