"""How is KV of another layout read? Into a staging area of the owner's layout, then repacked.

    owner's blocks ──read──> staging blocks ──repack──> own blocks
Staging areas are bounded and shared by all reads of owners with one layout. A read takes its blocks in
chunks; while one is repacked the next one is under way. A read writes into the staging area alone: own
blocks are written by the thread that polls, and only where the tokens asked for belong.

A read that never ends keeps its slots for ever, but no other read waits for it: no read has more than
half of an area, and when such reads hold all of it there is another one, up to `MAX_AREAS`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from kv_transfer.checksums import TakeChecksums
from kv_transfer.layout import Piece, blocks_over, entries, pieces
from kv_transfer.memory import check_pool_blocks
from kv_transfer.repack import PoolView, convert
from kv_transfer.source import Source
from kv_transfer.staging_area import NUM_SLOTS, Chunk, StagingArea
from protocol.errors import TransferFailed
from protocol.ids import BlockId
from protocol.ports import FetchStatus

MAX_CHUNKS = NUM_SLOTS // 2
"""Of one read at a time: two, so that one is read while the other is repacked."""
MAX_AREAS = 4

logger = logging.getLogger(__name__)


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
        self, make_area: Callable[[], StagingArea], mine: PoolView, checksum: TakeChecksums | None
    ) -> None:
        """`make_area` makes areas for blocks of that layout, each with a transport of its own, which are
        owned. Raises `TransferFailed` when it does.
        """
        self._make_area = make_area
        self._areas = [make_area()]
        """The newest last. Older ones have a read that does not end, and leave with it."""
        self.layout = self._areas[0].view.layout
        self.mine = mine
        self.checksum = checksum
        self.num_pending: Counter[str] = Counter()
        self._sources: dict[str, Source] = {}

    def connect(self, source: Source) -> None:
        self._areas[-1].reads.connect(source)
        self._sources[source.agent] = source

    def disconnect(self, agent: str) -> None:
        self._check_idle(agent)
        for area in self._areas:
            area.reads.disconnect(agent)
        self._sources.pop(agent, None)

    def close(self) -> None:
        for agent in self._sources:
            self._check_idle(agent)
        self._sources.clear()
        for area in self._areas:
            area.reads.close()

    def start_chunk(self, agent: str, their_blocks: Mapping[int, BlockId]) -> Chunk | None:
        """Read as many of these blocks, in order, as there is room for; None when there is none.

        Raises `TransferFailed` when that cannot be started.
        """
        area = self._area_with_room()
        if area is None:
            return None
        return area.start(self._sources[agent], dict(islice(their_blocks.items(), area.room)))

    def end_chunk(self, chunk: Chunk) -> None:
        """Of a read that is terminal."""
        chunk.area.end(chunk)
        for area in [area for area in self._areas[:-1] if area.is_idle]:
            area.reads.close()
            self._areas.remove(area)

    def _area_with_room(self) -> StagingArea | None:
        """A new one where reads that do not end hold all the others."""
        for area in reversed(self._areas):
            if area.room:
                return area
        if len(self._areas) == MAX_AREAS or not self._areas[-1].is_stuck:
            return None
        logger.warning("reads of KV in another layout do not end: later ones get another staging area")
        self._areas.append(self._make_area())
        return self._areas[-1]

    def fetch(
        self, agent: str, their_table: Sequence[BlockId], my_table: Sequence[BlockId], tokens: range
    ) -> StagedFetch:
        """As `KvReader.fetch_tokens`."""
        wish = _Wish(agent, their_table, my_table, tokens)
        self._check(wish)
        return StagedFetch(self, wish)

    def _check(self, wish: _Wish) -> None:
        source = self._sources.get(wish.agent)
        if source is None:
            raise TransferFailed(f"no connected peer is called {wish.agent}")
        their_size, my_size = self.layout.block_size, self.mine.layout.block_size
        theirs = entries(wish.their_table, blocks_over(wish.tokens, their_size), "the owner's")
        mine = entries(wish.my_table, blocks_over(wish.tokens, my_size), "the reader's")
        try:
            check_pool_blocks("remote", theirs, source.pool)
            check_pool_blocks("local", mine, self.mine.memory.description, are_written=True)
        except ValueError as error:
            raise TransferFailed(f"cannot read from {wish.agent}: {error}") from error

    def _check_idle(self, agent: str) -> None:
        if self.num_pending[agent]:
            raise TransferFailed(f"{self.num_pending[agent]} reads from {agent} are still pending")


class StagedFetch:
    """The `TokenFetch` of one wish. Terminal only when none of its chunks is under way."""

    def __init__(self, reads: StagedReads, wish: _Wish) -> None:
        """Raises `TransferFailed` when its first chunk cannot be started."""
        self._reads = reads
        self._wish = wish
        self._pieces = _pieces_by_block(wish.tokens, reads.layout.block_size, reads.mine.layout.block_size)
        self._to_do = {index: wish.their_table[index] for index in self._pieces}
        """The owner's blocks that are still to be read, by index into its table."""
        self._in_flight: list[Chunk] = []
        self._checksums: dict[int, int] = {}
        self._has_failed = False
        self._status = FetchStatus.PENDING
        self._start_chunk()
        reads.num_pending[wish.agent] += 1

    @property
    def num_bytes(self) -> int:
        return len(self._pieces) * self._reads.layout.block_bytes

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
        if not self._to_do or len(self._in_flight) >= MAX_CHUNKS:
            return False
        chunk = self._reads.start_chunk(self._wish.agent, self._to_do)
        if chunk is None:
            return False
        for index in chunk.blocks:
            del self._to_do[index]
        self._in_flight.append(chunk)
        return True

    def _land(self, chunk: Chunk, status: FetchStatus) -> None:
        self._in_flight.remove(chunk)
        if status is not FetchStatus.DONE:
            self._has_failed = True
        elif not self._has_failed:
            self._unpack(chunk)
        self._reads.end_chunk(chunk)

    def _unpack(self, chunk: Chunk) -> None:
        staging, mine = chunk.area.view, self._reads.mine
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
