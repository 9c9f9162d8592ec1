"""The seams of the system: small protocols, each with a real and a shipped fake implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from protocol.handoff import Fingerprint, Span, TransportEndpoint
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

    def connect(self, peer: TransportEndpoint, spans: Sequence[Span] | None = None) -> None:
        """Prepare reads from `peer`. Idempotent. Raises `LayoutMismatch` or `TransferFailed`.

        `spans` are what every block that is read from this peer consists of: all other bytes stay as they
        are, and the two sides' blocks may differ in size. None: whole blocks, of equal size. A peer must
        be disconnected before it is connected with other spans. `peer.others` is not looked at.
        """

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


class TokenFetch(FetchHandle, Protocol):
    """One read of a range of tokens in flight."""

    def checksums(self) -> Mapping[int, int]:
        """CRC-32 of the owner's blocks as they arrived, by index into the owner's block table.

        To be asked once, between DONE and `release`. Takes as long as it takes to read the blocks; empty
        when the reader takes no checksums. A block that was read again counts as it arrived last.
        """


class KvReader(Protocol):
    """Reads the KV of tokens from owners whose blocks may be laid out otherwise than one's own.

    All methods are called from one thread. Nobody but the reader touches the blocks that a read is for,
    from the call of `fetch_tokens` to the read's terminal state.
    """

    def connect(self, peer: TransportEndpoint, fingerprint: Fingerprint) -> None:
        """Prepare reads from `peer`. Idempotent. Raises `LayoutMismatch` or `TransferFailed`."""

    def disconnect(self, agent: str) -> None:
        """Forget a peer by its agent name. Idempotent; no read from it may be pending."""

    def fetch_tokens(
        self, agent: str, remote_table: Sequence[BlockId], local_table: Sequence[BlockId], tokens: range
    ) -> TokenFetch:
        """Start reading the KV of `tokens`, positions in the prompt, from the connected peer.

        The tables are the whole sequence's, each with its own side's block size. Where the layouts are
        equal whole blocks are read, the first and the last as well; so `tokens` starts at the edge of a
        block of one's own, or in a block that this sequence alone uses. Raises `TransferFailed` when the
        read cannot be started, or a table is too short; then no block is touched.
        """

    def close(self) -> None:
        """Drop all peers. Idempotent; no read may be pending."""


class Directory(Protocol):
    """Tells who lives. Entries that are not announced again within a few seconds vanish."""

    async def announce(self, record: WorkerRecord) -> None:
        """Add or refresh a worker."""

    async def withdraw(self, identity: WorkerIdentity) -> None:
        """Remove a worker. Idempotent."""

    async def workers(self) -> tuple[WorkerRecord, ...]:
        """All living workers, in a stable order."""
