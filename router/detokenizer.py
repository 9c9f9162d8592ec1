"""Tokens to text as they come: whole characters only, and nothing of a stop string.

token -> Detokenizer (holds back bytes of an unfinished character)
      -> StopMatcher (holds back what may become a stop string) -> text
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from router.tokenizer import Tokenizer

MAX_HELD_TOKENS = 64
"""A character has four bytes at most: if so many tokens make no text, they are garbage. Bounds the work
per token, which grows with the tokens held back."""


class Detokenizer:
    """The text of one output, token by token; together it is what decoding all tokens at once gives."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._shown: list[int] = []
        """The tokens of the last text given out: what follows is decoded in their context."""
        self._held: list[int] = []
        """Tokens that have given no text yet."""

    def push(self, token_id: int) -> str:
        """The text that the token completes, perhaps none."""
        self._held.append(token_id)
        try:
            text: str | None = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:  # the library's type: later bytes changed earlier text
            return self._restart()
        if text is None:
            return self._restart() if len(self._held) > MAX_HELD_TOKENS else ""
        self._shown, self._held = self._held, []
        return text

    def flush(self) -> str:
        """The text held back, at the end of the output: an unfinished character shows as U+FFFD."""
        before = self._tokenizer.decode(self._shown)
        text = self._tokenizer.decode(self._shown + self._held)
        self._shown, self._held = [], []
        return text[len(before) :]

    def _restart(self) -> str:
        text = self.flush()
        self._stream = DecodeStream(skip_special_tokens=True)
        return text


class StopMatcher:
    """Cuts a text at the first stop string that is complete, however the text is split into pieces.

    "First" is the one that ends first; of several that end together, the longest.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._buffer = ""
        self._num_passed = 0
        """Characters of the buffer in which no match may end."""
        self.is_matched = False
        """A stop string was found; what is pushed after that is dropped."""

    def push(self, text: str, may_end: bool = True) -> str:
        """The part of the text so far, and not given out yet, that is no stop string's beginning.

        Without `may_end` no stop string may end in this text, but one may begin in it.
        """
        if self.is_matched:
            return ""
        if not self._stop:
            return text
        self._buffer += text
        if not may_end:
            self._num_passed = len(self._buffer)
        found = [(at + len(stop), at) for stop in self._stop if (at := self._find(stop)) >= 0]
        if found:
            self.is_matched = True
            safe, self._buffer = self._buffer[: min(found)[1]], ""
            return safe
        keep = len(self._buffer) - self._num_held()
        safe, self._buffer = self._buffer[:keep], self._buffer[keep:]
        self._num_passed = max(self._num_passed - keep, 0)
        return safe

    def _find(self, stop: str) -> int:
        return self._buffer.find(stop, max(self._num_passed - len(stop) + 1, 0))

    def flush(self) -> str:
        """The text held back, at the end of the output."""
        text, self._buffer = self._buffer, ""
        return text

    def _num_held(self) -> int:
        """Length of the longest end of the buffer that begins a stop string."""
        longest = max(len(stop) for stop in self._stop) - 1
        for length in range(min(longest, len(self._buffer)), 0, -1):
            if any(stop.startswith(self._buffer[-length:]) for stop in self._stop):
                return length
        return 0
