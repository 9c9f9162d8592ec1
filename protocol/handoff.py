"""The KV hand-off's vocabulary: fingerprints, tickets, leases and verdicts.

P: allocate -> ticket -> compute, chunk by chunk -> HELD under a lease --renew--> HELD
                                                    |--release by the first reader--> VALID (blocks freed)
                                                    \\--lapse-----------------------> EXPIRED (blocks freed)
D: reserve -> fetch what is ready, until complete -> release(ticket)
                                                    |--VALID: admit
                                                    \\--EXPIRED, UNKNOWN: discard
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from protocol.ids import BlockId, TicketId, WorkerIdentity
from protocol.rank_layout import RankLayout

WIRE_VERSION = 4
"""Raised with every change of meaning on the wire. History: 1 = first, 2 = several choices a request,
3 = the ticket goes out before the prefill is done, 4 = workers may have several ranks."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What two workers must agree on before any KV moves between them."""

    model: str
    revision: str
    """Digest of config and weights: equal folders have equal revisions wherever they lie."""
    dtype: str
    kv_dtype: str
    num_layers: int
    """Of the whole model, as `num_kv_heads`: what each rank holds follows from the two sizes."""
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_layout: str = "block,layer,kv,head,token,dim"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    wire_version: int = WIRE_VERSION

    @property
    def rank_layout(self) -> RankLayout:
        """How the model is dealt out to the worker's ranks."""
        return RankLayout(self.tensor_parallel_size, self.pipeline_parallel_size)

    def differences(self, other: Fingerprint) -> list[str]:
        """One line per field that differs, with both values; empty when compatible."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return [
            f"{name}: {mine!r} here, {theirs!r} there" for name, mine, theirs in pairs if mine != theirs
        ]


@dataclass(frozen=True, slots=True)
class Ticket:
    """A right to read one prompt's KV blocks from their owner for as long as the lease holds."""

    ticket_id: TicketId
    owner: WorkerIdentity
    owner_address: str
    """host:port of the owner's gRPC server."""
    block_ids: tuple[BlockId, ...]
    """The owner's blocks in prompt order; the last one may be partly filled."""
    num_tokens: int
    """Tokens whose KV the blocks hold once the prefill is complete."""
    tokens_ready: int
    """Tokens whose KV was complete when this ticket was written."""
    lease_s: float
    """Seconds from receipt within which the lease must be renewed."""


class Verdict(StrEnum):
    """The owner's final word on a ticket. Sticky: asked again by the same reader, it is the same.

    VALID for one reader at most: whoever comes later, with a ticket that was offered twice, gets EXPIRED,
    since the blocks may hold something else by now.
    """

    VALID = "valid"
    EXPIRED = "expired"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """The answer to a renewal."""

    held: bool
    """False: the lease lapsed or the ticket is unknown; whatever was read must be discarded."""
    tokens_ready: int
    lease_s: float


NOT_HELD = LeaseStatus(held=False, tokens_ready=0, lease_s=0.0)


@dataclass(frozen=True, slots=True)
class Released:
    """The answer to a release."""

    verdict: Verdict
    checksums: tuple[int, ...] = ()
    """CRC-32 of the ticket's blocks, in order, where they were asked for and the verdict is VALID."""


@dataclass(frozen=True, slots=True)
class Credit:
    """Blocks that one router may still hand to one decode worker."""

    blocks: int
    num_submissions: int
    """Of that router, on this stream, that `blocks` accounts for."""


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """One rank's registered KV pool, as its transport peers need to know it."""

    num_blocks: int
    """Equal on all ranks of a worker."""
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes that are neighbours in a block of the owner and in one of the reader's."""

    their_offset: int
    my_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TransportEndpoint:
    """How a reader reaches one rank's pool; `metadata` is opaque to all but the transport."""

    transport: str
    """'nixl', 'loopback', ...: both sides must use the same."""
    agent: str
    """Never reused: it carries the worker's incarnation."""
    pool: PoolDescription
    metadata: bytes
    others: tuple[TransportEndpoint, ...] = ()
    """Of rank 0: the endpoints of the worker's other ranks, in their order."""
