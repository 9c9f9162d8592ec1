"""From token deltas to the text that a client gets, with everything that its answer says about it."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.generation import FinishReason, GenerationRequest, Token, TokenDelta
from router.detokenizer import Detokenizer, StopMatcher
from router.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextRequest:
    """What a client asked, after tokenising."""

    generation: GenerationRequest
    stop: tuple[str, ...] = ()
    """The text ends before the first of these strings; looked for once `min_tokens` are there."""


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """One output token and where its text begins in the output."""

    token: Token
    text_offset: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request so far."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of an answer. Text may lag behind the tokens, never run ahead of them."""

    text: str
    tokens: tuple[AnswerToken, ...]
    finish_reason: FinishReason | None
    """Set in the last piece."""
    usage: Usage


class AnswerWriter:
    """Writes one answer: feed it the deltas in order until it returns a piece with a finish reason."""

    def __init__(self, request: TextRequest, tokenizer: Tokenizer) -> None:
        self._num_prompt_tokens = len(request.generation.prompt_token_ids)
        self._min_tokens = request.generation.sampling.min_tokens
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(request.stop)
        self._num_output_tokens = 0
        self._num_cached_tokens: int | None = None
        self._num_characters = 0

    def push(self, delta: TokenDelta) -> Piece:
        """The piece that the delta adds. With a stop string in it, the delta's later tokens are dropped."""
        if self._num_cached_tokens is None:  # a resumed leg finds its own output cached: not of interest
            self._num_cached_tokens = min(delta.receipt.num_cached_tokens, self._num_prompt_tokens)
        texts: list[str] = []
        tokens: list[AnswerToken] = []
        for at, token in enumerate(delta.tokens, start=1):
            tokens.append(AnswerToken(token, self._num_characters))
            self._num_output_tokens += 1
            ends_here = delta.finish_reason is FinishReason.STOP and at == len(delta.tokens)
            if not ends_here:  # the token that says "stop" is no part of the text
                texts.append(self._visible(self._detokenizer.push(token.token_id)))
            if self._matcher.is_matched:
                return self._piece(texts, tokens, FinishReason.STOP)
        if delta.finish_reason is None:
            return self._piece(texts, tokens, None)
        texts.append(self._visible(self._detokenizer.flush()))
        stopped = self._matcher.is_matched
        texts.append(self._matcher.flush())
        return self._piece(texts, tokens, FinishReason.STOP if stopped else delta.finish_reason)

    def _visible(self, text: str) -> str:
        self._num_characters += len(text)
        return text if self._num_output_tokens <= self._min_tokens else self._matcher.push(text)

    def _piece(
        self, texts: list[str], tokens: list[AnswerToken], finish_reason: FinishReason | None
    ) -> Piece:
        usage = Usage(self._num_prompt_tokens, self._num_output_tokens, self._num_cached_tokens or 0)
        return Piece("".join(texts), tuple(tokens), finish_reason, usage)
