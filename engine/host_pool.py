"""Which blocks of the host pool, to which preempted sequences are swapped, are free? None is shared."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from protocol.errors import EngineFault
from protocol.ids import HostBlockId


class HostPool:
    """Blocks 0 .. num_blocks - 1, each with one owner or none. Owned by one thread."""

    def __init__(self, num_blocks: int) -> None:
        self.num_total = num_blocks
        self._free = [HostBlockId(i) for i in range(num_blocks - 1, -1, -1)]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[HostBlockId]:
        """Hand blocks out. Raises `EngineFault` when more are asked for than are free."""
        if num_blocks > len(self._free):
            raise EngineFault(f"{num_blocks} host blocks asked for, {len(self._free)} are free")
        return [self._free.pop() for _ in range(num_blocks)]

    def free(self, block_ids: Items[HostBlockId]) -> None:
        self._free += reversed(block_ids)

    def check_integrity(self, used: Iterable[HostBlockId]) -> None:
        """Raise `EngineFault` unless the blocks that are not free are those in `used`, each once."""
        if sorted([*self._free, *used]) != list(range(self.num_total)):
            raise EngineFault("a host block is lost, or has two owners")
