"""The seams of the system: small protocols, each with a real and a shipped fake implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

from protocol.handoff import TransportEndpoint
from protocol.ids import BlockId, WorkerIdentity
from protocol.membership import WorkerRecord

Clock = Callable[[], float]
"""Monotonic seconds; only differences mean anything, and only within one process."""


class FetchStatus(StrEnum):
    """State of one read. DONE and FAILED are terminal: the transport touches no block afterwards."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class FetchHandle(Protocol):
    """One read in flight. Used by one thread."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the read moves."""

    def poll(self) -> FetchStatus:
        """Return the state now. Never blocks, never raises; terminal states are sticky."""

    def release(self) -> None:
        """Give the transport's resources back. Idempotent; only after a terminal state."""


class KvTransport(Protocol):
    """Moves KV blocks from a peer's pool into this worker's pool, by one-sided reads.

    The pool is registered at construction. Nobody writes into another worker's memory: the reader
    reads into blocks that only it owns. All methods are called from one thread.
    """

    @property
    def endpoint(self) -> TransportEndpoint:
        """What a reader needs to reach this pool."""

    def connect(self, peer: TransportEndpoint) -> None:
        """Prepare reads from `peer`. Idempotent. Raises `LayoutMismatch` or `TransferFailed`."""

    def disconnect(self, agent: str) -> None:
        """Forget a peer by its agent name. Idempotent; no read from it may be pending."""

    def fetch(
        self, agent: str, remote_blocks: Sequence[BlockId], local_blocks: Sequence[BlockId]
    ) -> FetchHandle:
        """Start reading `remote_blocks[i]` of the connected peer into `local_blocks[i]`.

        Raises `TransferFailed` when the read cannot be started; then no block is touched.
        """

    def close(self) -> None:
        """Drop all peers and the registration. Idempotent."""


class Directory(Protocol):
    """Tells who lives. Entries that are not announced again within a few seconds vanish."""

    async def announce(self, record: WorkerRecord) -> None:
        """Add or refresh a worker."""

    async def withdraw(self, identity: WorkerIdentity) -> None:
        """Remove a worker. Idempotent."""

    async def workers(self) -> tuple[WorkerRecord, ...]:
        """All living workers, in a stable order."""
