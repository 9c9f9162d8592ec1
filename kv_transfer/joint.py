"""How is a worker of several ranks read like one? From all that have a part of its KV, and all count.

fetch ──> rank 0 ── DONE ────┐
     ├──> rank 2 ── DONE ────┼──> DONE once all are, FAILED once all are terminal and one is not DONE
     └──> rank 3 ── FAILED ──┘
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from kv_transfer.source import Source
from protocol.errors import TransferFailed
from protocol.ids import BlockId
from protocol.ports import FetchHandle, FetchStatus, KvTransport

logger = logging.getLogger(__name__)


class JointReads:
    """Reads from whole workers over one transport, which it owns. On the transport's thread."""

    def __init__(self, transport: KvTransport) -> None:
        self._transport = transport
        self._sources: dict[str, Source] = {}

    def connect(self, source: Source) -> None:
        """To all ranks or to none. Idempotent. Raises `LayoutMismatch` or `TransferFailed`."""
        is_new = source.agent not in self._sources
        try:
            for rank in source.ranks:
                self._transport.connect(rank.endpoint, rank.spans)
        except BaseException:
            if is_new:
                self._disconnect(source)
            raise
        self._sources[source.agent] = source

    def disconnect(self, agent: str) -> None:
        """From all its ranks. Idempotent; no read from it may be pending."""
        source = self._sources.get(agent)
        if source is not None:
            self._disconnect(source)
            del self._sources[agent]

    def fetch(
        self, agent: str, remote_blocks: Sequence[BlockId], local_blocks: Sequence[BlockId]
    ) -> FetchHandle:
        """As `KvTransport.fetch`. Where only the first rank's read could be started, it fails later."""
        source = self._sources.get(agent)
        if source is None:
            raise TransferFailed(f"no connected peer is called {agent}")
        first, *others = (rank.endpoint.agent for rank in source.ranks)
        handles = [self._transport.fetch(first, remote_blocks, local_blocks)]
        if not others:
            return handles[0]
        try:
            for other in others:
                handles.append(self._transport.fetch(other, remote_blocks, local_blocks))
        except TransferFailed as error:  # too late to raise it: the reads before it are under way
            logger.warning("%s", error.message)
            return JointFetch(handles, num_bytes=_num_bytes(handles), has_failed=True)
        return JointFetch(handles, num_bytes=_num_bytes(handles))

    def close(self) -> None:
        self._transport.close()
        self._sources.clear()

    def _disconnect(self, source: Source) -> None:
        for rank in source.ranks:
            self._transport.disconnect(rank.endpoint.agent)


class PartialRead(Protocol):
    """What `JointFetch` asks of its parts. As in `FetchHandle`."""

    def poll(self) -> FetchStatus: ...

    def release(self) -> None: ...


class JointFetch:
    """The `TokenFetch` of several reads for the same tokens. Terminal only when all of them are."""

    def __init__(self, handles: Sequence[PartialRead], *, num_bytes: int, has_failed: bool = False) -> None:
        """`num_bytes` is what all of them move; `has_failed`: there should be more of them."""
        self._handles = handles
        self._num_bytes = num_bytes
        self._has_failed = has_failed
        self._status = FetchStatus.PENDING

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def poll(self) -> FetchStatus:
        if self._status is FetchStatus.PENDING:
            self._status = self._advance()
        return self._status

    def release(self) -> None:
        if self._status is FetchStatus.PENDING:
            raise TransferFailed("a read from several ranks is still pending")
        for handle in self._handles:
            handle.release()

    def checksums(self) -> Mapping[int, int]:
        """None: no rank has seen whole blocks of the owner."""
        return {}

    def _advance(self) -> FetchStatus:
        statuses = {handle.poll() for handle in self._handles}
        if FetchStatus.PENDING in statuses:
            return FetchStatus.PENDING
        is_done = statuses == {FetchStatus.DONE} and not self._has_failed
        return FetchStatus.DONE if is_done else FetchStatus.FAILED


def _num_bytes(handles: Sequence[FetchHandle]) -> int:
    return sum(handle.num_bytes for handle in handles)
