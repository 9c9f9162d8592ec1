"""How much of a prompt has a worker probably cached? A bounded memory of what was sent to it.

An estimate: the worker may have evicted what is remembered here, and may hold what other routers sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixMemory:
    """The full blocks of prompts that one worker was sent, by content and position; used ones live on."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def note(self, token_ids: Sequence[int], cache_salt: str, max_blocks: int) -> None:
        """The worker gets these tokens now; it has `max_blocks` blocks in all."""
        # The first block comes last: a chain whose first block is forgotten is of no use.
        for block_hash in reversed(self._chain(token_ids, cache_salt)):
            self._hashes[block_hash] = None
            self._hashes.move_to_end(block_hash)
        while len(self._hashes) > max_blocks:
            self._hashes.popitem(last=False)

    def num_known_tokens(self, token_ids: Sequence[int], cache_salt: str) -> int:
        """Tokens at the beginning whose blocks the worker was sent before."""
        num_blocks = 0
        for block_hash in self._chain(token_ids, cache_salt):
            if block_hash not in self._hashes:
                break
            num_blocks += 1
        return num_blocks * self._block_size

    def clear(self) -> None:
        """The worker was told to forget."""
        self._hashes.clear()

    def _chain(self, token_ids: Sequence[int], cache_salt: str) -> list[int]:
        """A hash per full block that covers all before it. Python's own: it need not travel."""
        hashes: list[int] = []
        block_hash = hash(cache_salt)
        for end in range(self._block_size, len(token_ids) + 1, self._block_size):
            block_hash = hash((block_hash, *token_ids[end - self._block_size : end]))
            hashes.append(block_hash)
        return hashes
