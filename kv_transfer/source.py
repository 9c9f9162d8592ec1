"""Which ranks of an owner does a reader's rank need, and what of their blocks? The fingerprints tell."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.parts import num_rows, rank_reads
from kv_transfer.spans import Spans
from protocol.errors import LayoutMismatch
from protocol.handoff import Fingerprint, PoolDescription, TransportEndpoint
from protocol.rank_layout import kv_parts


@dataclass(frozen=True, slots=True)
class SourceRank:
    """One rank of an owner that is read from."""

    endpoint: TransportEndpoint
    spans: Spans


@dataclass(frozen=True, slots=True)
class Source:
    """An owner, as one rank of a reader sees it."""

    agent: str
    """Of its rank 0: what the whole worker is called."""
    ranks: tuple[SourceRank, ...]

    @property
    def pool(self) -> PoolDescription:
        """The smallest of those that are read from; they should all have as many blocks."""
        return min((rank.endpoint.pool for rank in self.ranks), key=lambda pool: pool.num_blocks)


def source_of(
    peer: TransportEndpoint, theirs: Fingerprint, *, mine: Fingerprint, my_rank: int, head_bytes: int
) -> Source:
    """What `my_rank` reads from an owner, into blocks of as many tokens and of the same number type.

    `head_bytes` is as in `rank_reads`. Raises `LayoutMismatch` when the owner's endpoints are not those
    that its fingerprint tells of.
    """
    endpoints = (peer, *peer.others)
    if len(endpoints) != theirs.rank_layout.num_ranks:
        raise LayoutMismatch(
            f"{peer.agent} tells of {len(endpoints)} ranks, but its fingerprint of "
            f"{theirs.rank_layout.num_ranks}: {theirs}"
        )
    parts = kv_parts(theirs.num_layers, theirs.num_kv_heads, theirs.rank_layout)
    reads = rank_reads(
        theirs.num_layers,
        theirs.num_kv_heads,
        theirs=theirs.rank_layout,
        mine=mine.rank_layout,
        my_rank=my_rank,
        head_bytes=head_bytes,
    )
    for read in reads:
        _check_size(endpoints[read.rank], num_rows(parts[read.rank]) * head_bytes, theirs)
    return Source(peer.agent, tuple(SourceRank(endpoints[read.rank], read.spans) for read in reads))


def _check_size(endpoint: TransportEndpoint, block_bytes: int, theirs: Fingerprint) -> None:
    if endpoint.pool.block_bytes != block_bytes:
        raise LayoutMismatch(
            f"a block of {endpoint.agent} has {endpoint.pool.block_bytes} bytes, but one of such KV has "
            f"{block_bytes}: {theirs}"
        )
