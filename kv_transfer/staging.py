"""How is KV of another layout read? Into a staging area of the owner's layout, then repacked.

    owner's blocks ──read──> staging blocks ──repack──> own blocks
The staging area is bounded and shared by all reads of owners with one layout. A read takes its blocks in
chunks; while one is repacked the next one is under way. A read writes into the staging area alone: own
blocks are written by the thread that polls, and only where the tokens asked for belong.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.checksums import TakeChecksums
from kv_transfer.layout import Piece, blocks_over, entries, pieces
from kv_transfer.memory import check_pool_blocks
from kv_transfer.repack import PoolView, convert
from protocol.errors import LayoutMismatch, TransferFailed
from protocol.handoff import TransportEndpoint
from protocol.ids import BlockId
from protocol.ports import FetchHandle, FetchStatus, KvTransport


@dataclass(frozen=True, slots=True)
class _Wish:
    """What one read is for: tokens, and where they are on both sides."""

    agent: str
    their_table: Sequence[BlockId]
    my_table: Sequence[BlockId]
    tokens: range


class StagedReads:
    """Reads from owners whose blocks have one layout, which is not one's own. On the transport's thread."""

    def __init__(
        self, transport: KvTransport, staging: PoolView, mine: PoolView, checksum: TakeChecksums | None
    ) -> None:
        """`transport` reads into the memory of `staging`; it is owned."""
        self.transport = transport
        self.staging = staging
        self.mine = mine
        self.checksum = checksum
        self.free_blocks: deque[BlockId] = deque(map(BlockId, range(1, staging.memory.num_blocks)))
        self.chunk_blocks = max(1, len(self.free_blocks) // 2)
        """Half of the area: so two chunks are under way, or two reads."""
        self.num_pending: Counter[str] = Counter()
        self._peers: dict[str, TransportEndpoint] = {}

    def connect(self, peer: TransportEndpoint) -> None:
        layout = self.staging.layout
        if peer.pool.block_bytes != layout.block_bytes:
            raise LayoutMismatch(
                f"a block of {peer.agent} has {peer.pool.block_bytes} bytes, but one of {layout} "
                f"has {layout.block_bytes}"
            )
        self.transport.connect(peer)
        self._peers[peer.agent] = peer

    def disconnect(self, agent: str) -> None:
        self._check_idle(agent)
        self.transport.disconnect(agent)
        self._peers.pop(agent, None)

    def close(self) -> None:
        for agent in self._peers:
            self._check_idle(agent)
        self._peers.clear()
        self.transport.close()

    def fetch(
        self, agent: str, their_table: Sequence[BlockId], my_table: Sequence[BlockId], tokens: range
    ) -> StagedFetch:
        """As `KvReader.fetch_tokens`."""
        wish = _Wish(agent, their_table, my_table, tokens)
        self._check(wish)
        return StagedFetch(self, wish)

    def _check(self, wish: _Wish) -> None:
        peer = self._peers.get(wish.agent)
        if peer is None:
            raise TransferFailed(f"no connected peer is called {wish.agent}")
        their_size, my_size = self.staging.layout.block_size, self.mine.layout.block_size
        theirs = entries(wish.their_table, blocks_over(wish.tokens, their_size), "the owner's")
        mine = entries(wish.my_table, blocks_over(wish.tokens, my_size), "the reader's")
        try:
            check_pool_blocks("remote", theirs, peer.pool)
            check_pool_blocks("local", mine, self.mine.memory.description, are_written=True)
        except ValueError as error:
            raise TransferFailed(f"cannot read from {wish.agent}: {error}") from error

    def _check_idle(self, agent: str) -> None:
        if self.num_pending[agent]:
            raise TransferFailed(f"{self.num_pending[agent]} reads from {agent} are still pending")


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One read into the staging area."""

    handle: FetchHandle
    blocks: dict[int, BlockId]
    """The staging block of each index into the owner's table."""


class StagedFetch:
    """The `TokenFetch` of one wish. Terminal only when none of its chunks is under way."""

    def __init__(self, reads: StagedReads, wish: _Wish) -> None:
        """Raises `TransferFailed` when its first chunk cannot be started."""
        self._reads = reads
        self._wish = wish
        self._pieces = _pieces_by_block(
            wish.tokens, reads.staging.layout.block_size, reads.mine.layout.block_size
        )
        self._to_do = deque(self._pieces)
        self._in_flight: list[_Chunk] = []
        self._checksums: dict[int, int] = {}
        self._has_failed = False
        self._status = FetchStatus.PENDING
        self._start_chunk()
        reads.num_pending[wish.agent] += 1

    @property
    def num_bytes(self) -> int:
        return len(self._pieces) * self._reads.staging.layout.block_bytes

    def checksums(self) -> dict[int, int]:
        return self._checksums

    def poll(self) -> FetchStatus:
        if self._status is FetchStatus.PENDING:
            self._status = self._advance()
            if self._status is not FetchStatus.PENDING:
                self._reads.num_pending[self._wish.agent] -= 1
        return self._status

    def release(self) -> None:
        if self._status is FetchStatus.PENDING:
            raise TransferFailed(f"a read from {self._wish.agent} is still pending")

    def _advance(self) -> FetchStatus:
        self._fill_up()  # before the repacking, so that chunks are read meanwhile
        for chunk in list(self._in_flight):
            status = chunk.handle.poll()
            if status is not FetchStatus.PENDING:
                self._land(chunk, status)
        self._fill_up()
        if self._in_flight or (self._to_do and not self._has_failed):
            return FetchStatus.PENDING
        return FetchStatus.FAILED if self._has_failed else FetchStatus.DONE

    def _fill_up(self) -> None:
        """Start as many chunks as the staging area has room for."""
        try:
            while not self._has_failed and self._start_chunk():
                pass
        except TransferFailed:  # too late to raise it
            self._has_failed = True

    def _start_chunk(self) -> bool:
        """False when nothing is left to start, or no room for it now."""
        free = self._reads.free_blocks
        num_blocks = min(len(self._to_do), len(free), self._reads.chunk_blocks)
        if not num_blocks:
            return False
        blocks = {self._to_do[i]: free[i] for i in range(num_blocks)}
        theirs = [self._wish.their_table[index] for index in blocks]
        handle = self._reads.transport.fetch(self._wish.agent, theirs, list(blocks.values()))
        for _ in blocks:  # only now: a read that cannot be started takes nothing
            self._to_do.popleft()
            free.popleft()
        self._in_flight.append(_Chunk(handle, blocks))
        return True

    def _land(self, chunk: _Chunk, status: FetchStatus) -> None:
        chunk.handle.release()
        self._in_flight.remove(chunk)
        if status is not FetchStatus.DONE:
            self._has_failed = True
        elif not self._has_failed:
            self._unpack(chunk)
        self._reads.free_blocks.extend(chunk.blocks.values())

    def _unpack(self, chunk: _Chunk) -> None:
        staging, mine = self._reads.staging, self._reads.mine
        if self._reads.checksum is not None:
            numbers = self._reads.checksum(staging.memory, list(chunk.blocks.values()))
            self._checksums.update(zip(chunk.blocks, numbers, strict=True))
        for index, block in chunk.blocks.items():
            for piece in self._pieces[index]:
                source = staging.tokens(block, piece.their_offset, piece.num_tokens)
                my_block = self._wish.my_table[piece.my_index]
                convert(source, mine.tokens(my_block, piece.my_offset, piece.num_tokens))


def _pieces_by_block(tokens: range, their_size: int, my_size: int) -> dict[int, list[Piece]]:
    """By index into the owner's block table."""
    by_block: dict[int, list[Piece]] = {}
    for piece in pieces(tokens, their_size, my_size):
        by_block.setdefault(piece.their_index, []).append(piece)
    return by_block
