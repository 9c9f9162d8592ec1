"""Where does KV of another layout land? In slots of a memory that is read into by an agent of its own.

slot      0 |####|   being read into: a chunk
          1 |####|   its read does not end: the slot is lost, and nobody else may use it
          2 |    |   free
          3 |    |   free
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from kv_transfer.joint import JointReads
from kv_transfer.repack import PoolView
from kv_transfer.source import Source
from protocol.ids import BlockId
from protocol.ports import Clock, FetchHandle

NUM_SLOTS = 4
STUCK_S = 2.0
"""A chunk that is read for so long is not worth waiting for: a slot holds some MiB."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One read into a slot."""

    area: StagingArea
    handle: FetchHandle
    blocks: dict[int, BlockId]
    """The staging block of each index into the owner's table."""
    started_s: float


class StagingArea:
    """Memory for blocks of the owner's layout, and what reads into it. On the transport's thread."""

    def __init__(self, reads: JointReads, view: PoolView, clock: Clock) -> None:
        """`reads` go into the memory of `view`; they are owned."""
        self.reads = reads
        self.view = view
        self._clock = clock
        self._free: deque[BlockId] = deque(map(BlockId, range(1, view.memory.num_blocks)))
        self._slot_blocks = max(1, len(self._free) // NUM_SLOTS)
        self._in_flight: list[Chunk] = []

    @property
    def room(self) -> int:
        """Blocks that one chunk can have now."""
        return min(len(self._free), self._slot_blocks)

    @property
    def is_idle(self) -> bool:
        return not self._in_flight

    @property
    def is_stuck(self) -> bool:
        """A read does not seem to end."""
        now_s = self._clock()
        return any(now_s - chunk.started_s >= STUCK_S for chunk in self._in_flight)

    def start(self, source: Source, their_blocks: Mapping[int, BlockId]) -> Chunk:
        """Read these, no more than there is `room` for. Raises `TransferFailed`, and takes nothing then."""
        self.reads.connect(source)
        blocks = dict(zip(their_blocks, self._free, strict=False))
        handle = self.reads.fetch(source.agent, list(their_blocks.values()), list(blocks.values()))
        for _ in blocks:
            self._free.popleft()
        chunk = Chunk(self, handle, blocks, self._clock())
        self._in_flight.append(chunk)
        return chunk

    def end(self, chunk: Chunk) -> None:
        """Of a chunk whose read is terminal: its slot is free."""
        chunk.handle.release()
        self._in_flight.remove(chunk)
        self._free.extend(chunk.blocks.values())
