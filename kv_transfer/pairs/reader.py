"""How does a reader read from one owner? On a thread of its own, one read after the other.

    connecting ──> connected ──> lost or closed: reads that wait fail, no other one is taken
So an owner that is dead, frozen or far away delays the reads from itself alone.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer.pairs.channel import Channel, greet_owner
from kv_transfer.pairs.group import READER, Fabric, Pair
from kv_transfer.pairs.lane import Lane
from kv_transfer.pairs.messages import Shape, messages
from kv_transfer.pairs.metadata import PairMetadata
from kv_transfer.pairs.wishes import blocks_to_bytes, shape_to_bytes
from protocol.errors import TransferFailed
from protocol.ids import BlockId
from protocol.ports import FetchStatus

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Read:
    """One read: what it is for, and how it ended. The link's thread alone sets that."""

    their_blocks: Sequence[BlockId]
    my_blocks: Sequence[BlockId]
    status: FetchStatus = field(default=FetchStatus.PENDING, init=False)


class Link:
    """From one pool to one owner's. Begins to connect at once."""

    def __init__(self, metadata: PairMetadata, fabric: Fabric, theirs: Shape, mine: Shape) -> None:
        """The shapes say which bytes of a block go where; piece by piece they have the same sizes."""
        self._metadata = metadata
        self._fabric = fabric
        self._theirs, self._mine = theirs, mine
        self._reads: queue.SimpleQueue[Read | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._trouble: str | None = None
        """Why it is over."""
        self._channel: Channel | None = None
        self._thread = threading.Thread(target=self._run, name="kv pair reader", daemon=True)
        self._thread.start()

    def submit(self, read: Read) -> None:
        """Raises `TransferFailed` when the link is over."""
        with self._lock:
            if self._trouble is not None:
                raise TransferFailed(f"no connection to {self._metadata.agent}: {self._trouble}")
            self._reads.put(read)

    def close(self) -> None:
        """Idempotent; no read may wait. Waits for nothing: a link that is being made is made first, since
        the owner would wait for the rest of it."""
        with self._lock:
            self._trouble = self._trouble or "it was closed"
        self._reads.put(None)

    def join(self, limit_s: float) -> None:
        """Wait for the end of a link that was closed; after `limit_s` it is cut off."""
        self._thread.join(limit_s)
        with self._lock:
            channel = self._channel
        if channel is not None:
            channel.hang_up()

    def _run(self) -> None:
        trouble = "its thread broke down"
        try:
            trouble = self._work()
        finally:
            self._end(trouble)

    def _work(self) -> str:
        """Until the link is over; says why. With the exception goes what Gloo still held of a read."""
        pair: Pair | None = None
        current: Read | None = None
        try:
            channel = self._open()
            pair = self._fabric.pair(channel, READER)
            lane = Lane(pair, self._fabric.pool)
            while (current := self._reads.get()) is not None:
                self._read(lane, channel, current)
                current.status = FetchStatus.DONE
            trouble = "it was closed"
        except TransferFailed as error:
            trouble = error.message
        if pair is not None:
            pair.abort()
        if current is not None:
            current.status = FetchStatus.FAILED
        return trouble

    def _open(self) -> Channel:
        channel = Channel.open(self._metadata.host, self._metadata.port)
        with self._lock:
            self._channel = channel
        greet_owner(channel, self._metadata.secret, shape_to_bytes(self._theirs))
        return channel

    def _read(self, lane: Lane, channel: Channel, read: Read) -> None:
        mine = messages(self._mine, read.my_blocks, self._fabric.cut)
        lane.recv(mine, lambda: channel.send(blocks_to_bytes(read.their_blocks)))

    def _end(self, trouble: str) -> None:
        with self._lock:
            is_lost = self._trouble is None
            self._trouble = self._trouble or trouble
            waiting = list(self._drain())
        if self._channel is not None:
            self._channel.close()
        if is_lost:
            logger.warning("KV cannot be read from %s: %s", self._metadata.agent, trouble)
        for read in waiting:
            read.status = FetchStatus.FAILED

    def _drain(self) -> list[Read]:
        waiting: list[Read] = []
        while True:
            try:
                read = self._reads.get_nowait()
            except queue.Empty:
                return waiting
            if read is not None:
                waiting.append(read)
