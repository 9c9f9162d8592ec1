"""From token deltas to the texts that a client gets, with everything that its answer says about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.generation import FinishReason, GenerationRequest, Token, TokenDelta
from router.detokenizer import Detokenizer, StopMatcher
from router.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextRequest:
    """What a client asked, after tokenising."""

    generation: GenerationRequest
    stop: tuple[str, ...] = ()
    """The text ends before the first of these strings that ends behind `min_tokens`."""
    echo: str | None = None
    """The prompt's text, to be given before each output; None: it is not."""
    is_scoring: bool = False
    """Only the prompt is of interest: the one output token that workers sample is not given."""


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """One token and where its text begins: in the echoed prompt and output together."""

    token: Token
    text_offset: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request so far; its prompt counts once, the output of all choices together."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of one choice. Text may lag behind the tokens, never run ahead of them."""

    text: str
    tokens: tuple[AnswerToken, ...]
    finish_reason: FinishReason | None
    """Set in the choice's last piece."""
    usage: Usage
    index: int = 0
    prompt_tokens: tuple[AnswerToken, ...] = ()
    """In a choice's first piece, where the prompt was scored; its first token has no log-probability."""


@dataclass(slots=True)
class _Meter:
    """Counts for all choices of a request."""

    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None

    def note_cached(self, delta: TokenDelta) -> None:
        if self.num_cached_tokens is None:  # a resumed leg finds its own output cached: not of interest
            self.num_cached_tokens = min(delta.receipt.num_cached_tokens, self.num_prompt_tokens)

    @property
    def usage(self) -> Usage:
        return Usage(self.num_prompt_tokens, self.num_output_tokens, self.num_cached_tokens or 0)


class Answers:
    """Writes the answers to one request: feed it the deltas in order until all are complete."""

    def __init__(self, request: TextRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._meter = _Meter(len(request.generation.prompt_token_ids))
        self._open: dict[int, AnswerWriter] = {}
        for index in range(request.generation.n):
            self._open[index] = AnswerWriter(request, tokenizer, self._meter, index)
        self._needs_prompt = set(self._open)
        self._prompt_tokens: tuple[AnswerToken, ...] | None = None

    @property
    def is_complete(self) -> bool:
        return not self._open

    def push(self, delta: TokenDelta) -> Piece:
        """The piece that the delta adds to its choice, which may thereby end."""
        self._meter.note_cached(delta)
        piece = self._open[delta.index].push(delta)
        if piece.finish_reason is not None:
            del self._open[delta.index]
        return piece

    def prompt(self, index: int, scores: Sequence[Token]) -> Piece | None:
        """The piece with which a choice begins when the prompt is to be given; None in all other cases.

        `scores`: the prompt's tokens but the first with their log-probabilities, where they were asked for.
        """
        if index not in self._needs_prompt:
            return None
        self._needs_prompt.discard(index)
        is_scored = self._request.generation.sampling.prompt_logprobs is not None
        if self._request.echo is None and not is_scored:
            return None
        if self._prompt_tokens is None:  # the same for all choices
            self._prompt_tokens = self._scored(scores) if is_scored else ()
        return Piece(
            self._request.echo or "", (), None, self._meter.usage, index, prompt_tokens=self._prompt_tokens
        )

    def _scored(self, scores: Sequence[Token]) -> tuple[AnswerToken, ...]:
        detokenizer = Detokenizer(self._tokenizer)
        num_characters = 0
        tokens: list[AnswerToken] = []
        for token in (Token(self._request.generation.prompt_token_ids[0]), *scores):
            tokens.append(AnswerToken(token, num_characters))
            num_characters += len(detokenizer.push(token.token_id))
        return tuple(tokens)


class AnswerWriter:
    """Writes one choice: feed it the deltas in order until it returns a piece with a finish reason."""

    def __init__(self, request: TextRequest, tokenizer: Tokenizer, meter: _Meter, index: int = 0) -> None:
        self._is_scoring = request.is_scoring
        self._min_tokens = request.generation.sampling.min_tokens
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(request.stop)
        self._meter = meter
        self._index = index
        self._num_output_tokens = 0
        self._num_characters = len(request.echo or "")

    def push(self, delta: TokenDelta) -> Piece:
        """The piece that the delta adds. With a stop string in it, the delta's later tokens are dropped."""
        if self._is_scoring:
            return self._piece([], [], FinishReason.LENGTH)
        texts: list[str] = []
        tokens: list[AnswerToken] = []
        for at, token in enumerate(delta.tokens, start=1):
            tokens.append(AnswerToken(token, self._num_characters))
            self._num_output_tokens += 1
            self._meter.num_output_tokens += 1
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
        return self._matcher.push(text, may_end=self._num_output_tokens > self._min_tokens)

    def _piece(
        self, texts: list[str], tokens: list[AnswerToken], finish_reason: FinishReason | None
    ) -> Piece:
        return Piece("".join(texts), tuple(tokens), finish_reason, self._meter.usage, self._index)
