"""The bodies of answers: whole ones, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from protocol.generation import Token
from router.answers import AnswerToken, Piece, Usage
from router.tokenizer import Tokenizer

Json = dict[str, Any]

MIN_LOGPROB = -9999.0
"""JSON has no minus infinity."""


class Reply(Protocol):
    """Builds the bodies of one request's answer."""

    def opening(self) -> Sequence[Json]:
        """Chunks to send before the first piece."""

    def chunk(self, piece: Piece) -> Json | None:
        """The chunk for a piece; None when it would say nothing."""

    def usage_chunk(self, usage: Usage) -> Json:
        """The last chunk of a stream whose client asked for usage."""

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """The body of an answer that is not streamed; there is at least one piece of every choice."""


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """What an answer says besides its text."""

    reply_id: str
    created: int
    """Seconds since 1970."""
    model: str
    num_choices: int = 1
    num_logprobs: int | None = None
    """Best tokens to name for each token; None: no log-probabilities."""
    num_prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, in a field of their own."""
    echoes: bool = False
    """The prompt's tokens are shown as if they were output."""
    has_token_ids: bool = False
    includes_usage: bool = False
    """Stream: all chunks but the last one then have `usage: null`."""


class ChatReply:
    """Answers of /v1/chat/completions."""

    def __init__(self, options: ReplyOptions, tokenizer: Tokenizer) -> None:
        self._options = options
        self._tokenizer = tokenizer

    def opening(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(delta, (), None, index) for index in range(self._options.num_choices)]

    def chunk(self, piece: Piece) -> Json | None:
        if not _says_something(piece, self._options):
            return None
        delta = {"content": piece.text} if piece.text else {}
        return self._chunk(delta, piece.tokens, piece.finish_reason, piece.index)

    def _chunk(
        self, delta: Json, tokens: Sequence[AnswerToken], finish_reason: str | None, index: int
    ) -> Json:
        choice: Json = {"index": index, "delta": delta} | self._about(tokens, finish_reason)
        return _chunk(self._options, "chat.completion.chunk", choice)

    def _about(self, tokens: Sequence[AnswerToken], finish_reason: str | None) -> Json:
        about: Json = {"logprobs": None, "finish_reason": finish_reason}
        if self._options.num_logprobs is not None and tokens:
            about["logprobs"] = {"content": [self._logprob(t) for t in tokens], "refusal": None}
        if self._options.has_token_ids:
            about["token_ids"] = [t.token.token_id for t in tokens]
        return about

    def _logprob(self, entry: AnswerToken) -> Json:
        best = [self._token_logprob(t, p) for t, p in entry.token.top_logprobs]
        return self._token_logprob(entry.token.token_id, entry.token.logprob) | {"top_logprobs": best}

    def _token_logprob(self, token_id: int, logprob: float | None) -> Json:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": _text(raw), "logprob": _finite(logprob), "bytes": list(raw)}

    def usage_chunk(self, usage: Usage) -> Json:
        return _usage_chunk(self._options, "chat.completion.chunk", usage)

    def whole(self, pieces: Sequence[Piece]) -> Json:
        choices = [self._choice(own) for own in _by_choice(pieces)]
        body = _whole(self._options, "chat.completion", choices, pieces[-1].usage)
        if self._options.num_prompt_logprobs is not None:
            body["prompt_logprobs"] = _prompt_logprobs(pieces[0], self._options, self._tokenizer)
        return body

    def _choice(self, pieces: Sequence[Piece]) -> Json:
        text = "".join(piece.text for piece in pieces)
        tokens = [token for piece in pieces for token in piece.tokens]
        message = {"role": "assistant", "content": text, "refusal": None}
        choice: Json = {"index": pieces[0].index, "message": message}
        return choice | self._about(tokens, pieces[-1].finish_reason)


class CompletionReply:
    """Answers of /v1/completions."""

    def __init__(self, options: ReplyOptions, tokenizer: Tokenizer) -> None:
        self._options = options
        self._tokenizer = tokenizer

    def opening(self) -> tuple[()]:
        return ()

    def chunk(self, piece: Piece) -> Json | None:
        if not _says_something(piece, self._options):
            return None
        return _chunk(self._options, "text_completion", self._choice([piece]))

    def usage_chunk(self, usage: Usage) -> Json:
        return _usage_chunk(self._options, "text_completion", usage)

    def whole(self, pieces: Sequence[Piece]) -> Json:
        choices = [self._whole_choice(own) for own in _by_choice(pieces)]
        return _whole(self._options, "text_completion", choices, pieces[-1].usage)

    def _whole_choice(self, pieces: Sequence[Piece]) -> Json:
        choice = self._choice(pieces)
        if self._options.num_prompt_logprobs is not None:
            choice["prompt_logprobs"] = _prompt_logprobs(pieces[0], self._options, self._tokenizer)
        return choice

    def _choice(self, pieces: Sequence[Piece]) -> Json:
        tokens = [token for piece in pieces for token in piece.tokens]
        choice: Json = {
            "index": pieces[0].index,
            "text": "".join(piece.text for piece in pieces),
            "logprobs": None,
            "finish_reason": pieces[-1].finish_reason,
        }
        if self._options.num_logprobs is not None:
            echoed = pieces[0].prompt_tokens if self._options.echoes else ()
            choice["logprobs"] = self._logprobs([*echoed, *tokens], self._options.num_logprobs)
        if self._options.has_token_ids:
            choice["token_ids"] = [t.token.token_id for t in tokens]
        return choice

    def _logprobs(self, tokens: Sequence[AnswerToken], num_best: int) -> Json:
        return {
            "tokens": [self._token_text(t.token.token_id) for t in tokens],
            "token_logprobs": [_finite(t.token.logprob) for t in tokens],
            "top_logprobs": [self._best(t.token, num_best) for t in tokens],
            "text_offset": [t.text_offset for t in tokens],
        }

    def _best(self, token: Token, num_best: int) -> Json | None:
        """The best tokens and, as OpenAI has it, the token itself; None for the first one of a prompt."""
        if token.logprob is None:
            return None
        best = {self._token_text(token_id): _finite(p) for token_id, p in token.top_logprobs[:num_best]}
        return best | {self._token_text(token.token_id): _finite(token.logprob)}

    def _token_text(self, token_id: int) -> str:
        return _text(self._tokenizer.token_bytes(token_id))


def _says_something(piece: Piece, options: ReplyOptions) -> bool:
    has_logprobs = options.num_logprobs is not None
    shows_tokens = bool(piece.tokens) and (has_logprobs or options.has_token_ids)
    shows_prompt = bool(piece.prompt_tokens) and has_logprobs and options.echoes
    return bool(piece.text) or shows_tokens or shows_prompt or piece.finish_reason is not None


def _by_choice(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """The pieces of each choice, in the order of the choices."""
    found: dict[int, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.index, []).append(piece)
    return [found[index] for index in sorted(found)]


def _prompt_logprobs(piece: Piece, options: ReplyOptions, tokenizer: Tokenizer) -> list[Json | None]:
    """vLLM's form: by token id, for every token of the prompt; null for the first."""
    number = options.num_prompt_logprobs
    tokens = [entry.token for entry in piece.prompt_tokens]
    return [None if token.logprob is None else _ranked(token, number, tokenizer) for token in tokens]


def _ranked(token: Token, number: int | None, tokenizer: Tokenizer) -> Json:
    """The best tokens with their ranks, and the token itself, whose rank is unknown if not among them."""
    ranked: list[tuple[int, float, int | None]] = []
    ranked += [(t, p, rank) for rank, (t, p) in enumerate(token.top_logprobs[:number], start=1)]
    if token.token_id not in {token_id for token_id, _, _ in ranked}:
        ranked.append((token.token_id, token.logprob or 0.0, None))
    return {
        str(token_id): {
            "logprob": _finite(logprob),
            "rank": rank,
            "decoded_token": _text(tokenizer.token_bytes(token_id)),
        }
        for token_id, logprob, rank in ranked
    }


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, MIN_LOGPROB)


def usage_body(usage: Usage) -> Json:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


def _head(options: ReplyOptions, kind: str) -> Json:
    return {"id": options.reply_id, "object": kind, "created": options.created, "model": options.model}


def _chunk(options: ReplyOptions, kind: str, choice: Json) -> Json:
    body = _head(options, kind) | {"choices": [choice]}
    return body | {"usage": None} if options.includes_usage else body


def _usage_chunk(options: ReplyOptions, kind: str, usage: Usage) -> Json:
    return _head(options, kind) | {"choices": [], "usage": usage_body(usage)}


def _whole(options: ReplyOptions, kind: str, choices: list[Json], usage: Usage) -> Json:
    return _head(options, kind) | {"choices": choices, "usage": usage_body(usage)}
