"""How do KV blocks move between workers? NIXL over UCX: RDMA, NVLink, shared memory or TCP, as found.

The whole pool is registered once. Each span of its blocks is described once, per side, as one strided
list; a read names blocks and spans by index. Three properties of NIXL 1.5 shape this file:

- Connections are made by the target's progress thread, and over TCP that thread also serves the reads:
  a pool without one cannot be read. The stock Python agent spins a core for it, because it fixes the
  thread's wait at 0; so the bindings below that class are used, with `progress_interval_s`.
- `postXferReq` copies on the spot where the kernel can (same machine): `fetch` then takes as long as
  the copy. It belongs on a thread of its own.
- A read that was posted may have touched its blocks, whatever the post says. So an error from the post
  is a FAILED handle, and only errors from before it are raised.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kv_transfer.memory import PoolMemory
from kv_transfer.nixl_agent import NixlAgent, PreparedPeer
from kv_transfer.nixl_metadata import NixlMetadata
from kv_transfer.peers import PeerTable
from protocol.errors import StartupError, TransferFailed
from protocol.handoff import Span, TransportEndpoint
from protocol.ids import BlockId
from protocol.ports import FetchHandle, FetchStatus

NIXL = "nixl"
DEFAULT_PROGRESS_INTERVAL_S = 0.001
"""Costs 2 % of a core. The thread wakes up by itself when something arrives; this is its fallback."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NixlLibrary:
    """NIXL's bindings, and the seam at which its errors become ours."""

    bindings: Any
    errors: tuple[type[Exception], ...]
    """All that the bindings raise: their own, and what C++ exceptions arrive as."""

    @contextmanager
    def translated(self, action: str) -> Iterator[None]:
        """Raise `TransferFailed` for whatever NIXL raises; `action` says what could not be done."""
        try:
            yield
        except self.errors as error:
            raise TransferFailed(f"cannot {action}: {type(error).__name__}: {error}") from error


def load_library() -> NixlLibrary:
    """Raises `StartupError` when NIXL is not installed, or its libraries do not load."""
    is_first_import = "nixl" not in sys.modules
    raise_exceptions = logging.raiseExceptions
    try:
        import nixl
    except (ImportError, OSError) as error:
        raise StartupError(
            f"NIXL cannot be loaded ({error}): pip install nixl, or set transport: loopback to keep "
            "prefill and decode in one process"
        ) from error
    if is_first_import:
        _undo_logging_setup(raise_exceptions)
    own = (kind for kind in vars(nixl.nixlBind).values() if isinstance(kind, type))
    errors = tuple(kind for kind in own if issubclass(kind, Exception))
    return NixlLibrary(nixl.nixlBind, (*errors, RuntimeError, ValueError, IndexError, OverflowError))


def _undo_logging_setup(raise_exceptions: bool) -> None:
    """NIXL's import prints to stdout from then on, and changes logging for the whole process."""
    logging.raiseExceptions = raise_exceptions
    nixl_logger = logging.getLogger("nixl")
    for handler in list(nixl_logger.handlers):
        nixl_logger.removeHandler(handler)
    nixl_logger.propagate = True
    nixl_logger.setLevel(logging.WARNING)


class NixlTransport:
    """The `KvTransport` over one NIXL agent. UCX takes its settings from the process's environment."""

    def __init__(
        self,
        memory: PoolMemory,
        agent: str,
        *,
        progress_interval_s: float = DEFAULT_PROGRESS_INTERVAL_S,
    ) -> None:
        """Register `memory` under the name `agent`, which no other agent may ever have had.

        Raises `StartupError` when NIXL is missing, or cannot use the memory.
        """
        self._library = load_library()
        self._memory = memory
        try:
            with self._library.translated(f"start the NIXL agent {agent}"):
                self._agent = NixlAgent(self._library.bindings, agent, memory, progress_interval_s)
                metadata = self._agent.metadata(memory)
        except TransferFailed as error:
            raise StartupError(
                f"{error.message}: see UCX_TLS and UCX_NET_DEVICES, or set transport: loopback"
            ) from error
        self._endpoint = TransportEndpoint(NIXL, agent, memory.description, metadata)
        self._peers = PeerTable(self._endpoint)
        self._prepared: dict[str, PreparedPeer] = {}

    @property
    def endpoint(self) -> TransportEndpoint:
        return self._endpoint

    def connect(self, peer: TransportEndpoint, spans: Sequence[Span] | None = None) -> None:
        connection = self._peers.connection(peer, spans)
        if self._peers.has(connection):
            return
        try:
            metadata = NixlMetadata.from_bytes(peer.metadata)
        except ValueError as error:
            raise TransferFailed(f"the metadata of {peer.agent} is garbled: {error}") from error
        with self._library.translated(f"connect to {peer.agent}"):
            self._prepared[peer.agent] = self._agent.add_peer(connection, metadata)
        self._peers.add(connection)

    def disconnect(self, agent: str) -> None:
        if self._peers.remove(agent):
            self._forget(agent)

    def fetch(
        self, agent: str, remote_blocks: Sequence[BlockId], local_blocks: Sequence[BlockId]
    ) -> FetchHandle:
        connection = self._peers.check_read(agent, remote_blocks, local_blocks)
        if not local_blocks:  # NIXL knows no empty read
            return EmptyFetch()
        with self._library.translated(f"prepare a read from {agent}"):
            handle = self._agent.make_read(self._prepared[agent], remote_blocks, local_blocks)
        num_bytes = connection.num_bytes(local_blocks)
        return NixlFetch(
            self._library, self._agent, handle, name=agent, num_bytes=num_bytes, peers=self._peers
        )

    def close(self) -> None:
        agents = self._peers.close()
        for agent in agents:
            self._forget(agent)
        with self._library.translated(f"close the NIXL agent {self._endpoint.agent}"):
            self._agent.close()

    def _forget(self, agent: str) -> None:
        with self._library.translated(f"disconnect from {agent}"):
            self._agent.remove_peer(agent, self._prepared.pop(agent))


class EmptyFetch:
    """The `FetchHandle` of a read of no blocks."""

    num_bytes = 0

    def poll(self) -> FetchStatus:
        return FetchStatus.DONE

    def release(self) -> None:
        """Nothing was taken."""


class NixlFetch:
    """The `FetchHandle` of one NIXL transfer request. Gives it back as soon as it is terminal."""

    def __init__(
        self,
        library: NixlLibrary,
        agent: NixlAgent,
        handle: int,
        *,
        name: str,
        num_bytes: int,
        peers: PeerTable,
    ) -> None:
        """Post the request `handle`, a read from the agent `name`."""
        self._library = library
        self._agent = agent
        self._handle = handle
        self._name = name
        self._num_bytes = num_bytes
        self._peers = peers
        self._status = FetchStatus.PENDING
        self._is_stuck = False
        """It failed and could not be cancelled."""
        peers.begin_read(name)
        self._step(agent.post)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def poll(self) -> FetchStatus:
        if self._status is FetchStatus.PENDING:
            self._step(self._agent.check)
        return self._status

    def release(self) -> None:
        if self._status is FetchStatus.PENDING:
            raise TransferFailed(f"a read from {self._name} is still pending")

    def _step(self, ask: Callable[[int], bool]) -> None:
        """Ask NIXL whether the read is done, and take leave of the request when it is terminal."""
        if self._is_stuck:
            return
        try:
            with self._library.translated(f"read from {self._name}"):
                is_done = ask(self._handle)
        except TransferFailed as error:
            logger.warning("%s", error.message)
            self._end(FetchStatus.FAILED)
        else:
            if is_done:
                self._end(FetchStatus.DONE)

    def _end(self, status: FetchStatus) -> None:
        """The request is given back first: that cancels what a failed read may still have under way.

        When that fails the read may go on for ever, and so it stays pending for ever: its blocks are
        never used again. NIXL is not asked twice, since it drops the request the second time without
        cancelling it. A read that is done has nothing left to cancel.
        """
        try:
            with self._library.translated(f"give back a read from {self._name}"):
                self._agent.release(self._handle)
        except TransferFailed as error:
            logger.error("%s", error.message)  # noqa: TRY400 - the message says it all
            self._is_stuck = status is not FetchStatus.DONE
        if not self._is_stuck:
            self._peers.end_read(self._name)
            self._status = status
