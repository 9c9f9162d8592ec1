"""Which tokens would complete a bad word, after what was generated so far?"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items


class BadWords:
    """Looked up by the token before the end: few words, if any, are looked at more closely. Immutable."""

    def __init__(self, words: Items[tuple[int, ...]]) -> None:
        self._alone = [word[0] for word in words if len(word) == 1]
        self._by_last: dict[int, dict[int, dict[tuple[int, ...], list[int]]]] = {}
        """The token before the end -> how many come before the end -> those -> the ends."""
        for word in words:
            if len(word) > 1:
                *start, end = word
                starts = self._by_last.setdefault(start[-1], {}).setdefault(len(start), {})
                starts.setdefault(tuple(start), []).append(end)

    def ends_after(self, token_ids: Items[int], num_prompt_tokens: int) -> Iterator[int]:
        """What the prompt ends with is not the output's doing."""
        yield from self._alone
        for length, ends in self._by_last.get(token_ids[-1], {}).items():
            start = len(token_ids) - length
            if start >= num_prompt_tokens:
                yield from ends.get(tuple(token_ids[start:]), ())


NO_BAD_WORDS = BadWords(())
