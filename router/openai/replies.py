"""The bodies of answers: whole ones, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from router.answers import AnswerToken, Piece, Usage
from router.tokenizer import Tokenizer

Json = dict[str, Any]

MIN_LOGPROB = -9999.0
"""JSON has no minus infinity."""


class Reply(Protocol):
    """Builds the bodies of one request's answer."""

    def opening(self) -> Json | None:
        """A chunk to send before the first piece."""

    def chunk(self, piece: Piece) -> Json | None:
        """The chunk for a piece; None when it would say nothing."""

    def usage_chunk(self, usage: Usage) -> Json:
        """The last chunk of a stream whose client asked for usage."""

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """The body of an answer that is not streamed; there is at least one piece."""


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """What an answer says besides its text."""

    reply_id: str
    created: int
    """Seconds since 1970."""
    model: str
    has_logprobs: bool = False
    has_token_ids: bool = False
    includes_usage: bool = False
    """Stream: all chunks but the last one then have `usage: null`."""


class ChatReply:
    """Answers of /v1/chat/completions."""

    def __init__(self, options: ReplyOptions, tokenizer: Tokenizer) -> None:
        self._options = options
        self._tokenizer = tokenizer

    def opening(self) -> Json:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def chunk(self, piece: Piece) -> Json | None:
        if not _says_something(piece, self._options):
            return None
        return self._chunk({"content": piece.text} if piece.text else {}, piece)

    def _chunk(self, delta: Json, piece: Piece | None) -> Json:
        choice: Json = {"index": 0, "delta": delta}
        choice |= self._about(piece.tokens if piece else (), piece.finish_reason if piece else None)
        return _chunk(self._options, "chat.completion.chunk", choice)

    def _about(self, tokens: Sequence[AnswerToken], finish_reason: str | None) -> Json:
        about: Json = {"logprobs": None, "finish_reason": finish_reason}
        if self._options.has_logprobs and tokens:
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
        text = "".join(piece.text for piece in pieces)
        tokens = [token for piece in pieces for token in piece.tokens]
        choice: Json = {"index": 0, "message": {"role": "assistant", "content": text, "refusal": None}}
        choice |= self._about(tokens, pieces[-1].finish_reason)
        return _whole(self._options, "chat.completion", choice, pieces[-1].usage)


class CompletionReply:
    """Answers of /v1/completions."""

    def __init__(self, options: ReplyOptions, tokenizer: Tokenizer) -> None:
        self._options = options
        self._tokenizer = tokenizer

    def opening(self) -> None:
        return None

    def chunk(self, piece: Piece) -> Json | None:
        if not _says_something(piece, self._options):
            return None
        return _chunk(self._options, "text_completion", self._choice([piece]))

    def usage_chunk(self, usage: Usage) -> Json:
        return _usage_chunk(self._options, "text_completion", usage)

    def whole(self, pieces: Sequence[Piece]) -> Json:
        return _whole(self._options, "text_completion", self._choice(pieces), pieces[-1].usage)

    def _choice(self, pieces: Sequence[Piece]) -> Json:
        tokens = [token for piece in pieces for token in piece.tokens]
        choice: Json = {
            "index": 0,
            "text": "".join(piece.text for piece in pieces),
            "logprobs": self._logprobs(tokens) if self._options.has_logprobs else None,
            "finish_reason": pieces[-1].finish_reason,
        }
        if self._options.has_token_ids:
            choice["token_ids"] = [t.token.token_id for t in tokens]
        return choice

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> Json:
        return {
            "tokens": [self._token_text(t.token.token_id) for t in tokens],
            "token_logprobs": [_finite(t.token.logprob) for t in tokens],
            "top_logprobs": [
                {self._token_text(token_id): _finite(p) for token_id, p in t.token.top_logprobs}
                for t in tokens
            ],
            "text_offset": [t.text_offset for t in tokens],
        }

    def _token_text(self, token_id: int) -> str:
        return _text(self._tokenizer.token_bytes(token_id))


def _says_something(piece: Piece, options: ReplyOptions) -> bool:
    shows_tokens = bool(piece.tokens) and (options.has_logprobs or options.has_token_ids)
    return bool(piece.text) or shows_tokens or piece.finish_reason is not None


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


def _whole(options: ReplyOptions, kind: str, choice: Json, usage: Usage) -> Json:
    return _head(options, kind) | {"choices": [choice], "usage": usage_body(usage)}
