"""How does a rank of a decode worker read tokens from owners of any layout? Directly where it can.

connect ──equal block size and KV type──> the transport over one's own pool: no copy; whole blocks from one
        │                                 rank where the ranks are dealt out alike, else spans of blocks
        └─unequal────────────────────────> `StagedReads`, one for each block layout that owners have
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count

from kv_transfer.checksums import TakeChecksums, require_checksums
from kv_transfer.fingerprint import check_compatible
from kv_transfer.joint import JointReads
from kv_transfer.layout import BlockLayout, blocks_over, entries
from kv_transfer.memory import MemoryKind, PoolMemory
from kv_transfer.parts import num_rows
from kv_transfer.repack import PoolView
from kv_transfer.source import Source, source_of
from kv_transfer.staging import StagedReads
from kv_transfer.staging_area import NUM_SLOTS, StagingArea
from protocol.errors import LayoutMismatch, SplitserveError, StartupError, TransferFailed
from protocol.handoff import Fingerprint, TransportEndpoint
from protocol.ids import BlockId
from protocol.ports import Clock, FetchHandle, FetchStatus, KvTransport, TokenFetch
from protocol.rank_layout import kv_parts

DEFAULT_STAGING_BYTES = 32 * 2**20
"""Of one owner layout; a block of an 8B model with 16 tokens has 2 MiB."""
MIN_STAGING_BLOCKS = 1 + NUM_SLOTS
"""The null block, and slots of one block."""

MakeTransport = Callable[[PoolMemory, int], KvTransport]
"""A transport over a pool; the number tells apart the agents of one worker (see `agent_name`)."""


class LayoutReader:
    """The `KvReader` of one rank over transports of any kind. Owns them; all of it on one thread."""

    def __init__(
        self,
        memory: PoolMemory,
        fingerprint: Fingerprint,
        make_transport: MakeTransport,
        *,
        rank: int = 0,
        checksum: TakeChecksums | None = None,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        clock: Clock = time.monotonic,
    ) -> None:
        """`memory` is the pool of this `rank`, `checksum` what is done with every block that arrives.

        Raises `StartupError` where there cannot be checksums, or the pool is not that of such a rank.
        """
        if checksum is not None:
            require_checksums(memory, fingerprint.rank_layout)
        self._part = kv_parts(fingerprint.num_layers, fingerprint.num_kv_heads, fingerprint.rank_layout)[
            rank
        ]
        self._row_bytes = _row_bytes(memory, num_rows(self._part), fingerprint)
        self._rank = rank
        self._memory = memory
        self._fingerprint = fingerprint
        self._make_transport = make_transport
        self._checksum = checksum
        self._staging_bytes = staging_bytes
        self._clock = clock
        self._serials = count()
        self._direct = JointReads(make_transport(memory, next(self._serials)))
        self._staged: dict[BlockLayout, StagedReads] = {}
        self._staged_peers: dict[str, StagedReads] = {}

    def connect(self, peer: TransportEndpoint, fingerprint: Fingerprint) -> None:
        check_compatible(self._fingerprint, fingerprint)
        if self._checksum is not None and fingerprint.rank_layout.num_ranks > 1:
            raise LayoutMismatch(
                f"{peer.agent} has several ranks, so its KV has no checksums: set "
                "kv_transfer.checksum: false"
            )
        if _is_alike(self._fingerprint, fingerprint):
            self._direct.connect(self._source(peer, fingerprint, self._row_bytes))
            return
        reads = self._staged_reads(fingerprint)
        reads.connect(self._source(peer, fingerprint, reads.layout.row_bytes))
        self._staged_peers[peer.agent] = reads

    def disconnect(self, agent: str) -> None:
        reads = self._staged_peers.get(agent)
        if reads is None:
            self._direct.disconnect(agent)
        else:
            reads.disconnect(agent)
            del self._staged_peers[agent]

    def fetch_tokens(
        self, agent: str, remote_table: Sequence[BlockId], local_table: Sequence[BlockId], tokens: range
    ) -> TokenFetch:
        if tokens.step != 1 or tokens.start < 0:
            raise TransferFailed(f"{tokens} is no range of tokens")
        reads = self._staged_peers.get(agent)
        if reads is not None:
            return reads.fetch(agent, remote_table, local_table, tokens)
        indices = blocks_over(tokens, self._fingerprint.block_size)
        remote = entries(remote_table, indices, "the owner's")
        local = entries(local_table, indices, "the reader's")
        handle = self._direct.fetch(agent, remote, local)
        return DirectFetch(handle, self._memory, indices, local, self._checksum)

    def close(self) -> None:
        for reads in self._staged.values():
            reads.close()
        self._direct.close()

    def _source(self, peer: TransportEndpoint, fingerprint: Fingerprint, head_bytes: int) -> Source:
        return source_of(
            peer, fingerprint, mine=self._fingerprint, my_rank=self._rank, head_bytes=head_bytes
        )

    def _staged_reads(self, fingerprint: Fingerprint) -> StagedReads:
        """Those of this layout; the staging area is made with the first owner that has it."""
        if self._memory.kind is not MemoryKind.HOST:
            raise LayoutMismatch(
                "KV of another layout can be taken over into host memory only: give all workers the same "
                f"block size and KV type. Here: {self._fingerprint}. There: {fingerprint}."
            )
        layout = BlockLayout.of(fingerprint, self._part)  # this rank's part, whatever ranks they have
        if layout not in self._staged:
            mine = PoolView(self._memory, BlockLayout.of(self._fingerprint, self._part))
            self._staged[layout] = StagedReads(lambda: self._make_area(layout), mine, self._checksum)
        return self._staged[layout]

    def _make_area(self, layout: BlockLayout) -> StagingArea:
        num_blocks = max(MIN_STAGING_BLOCKS, self._staging_bytes // layout.block_bytes)
        staging = PoolMemory.allocate(num_blocks, layout.block_bytes)
        try:
            transport = self._make_transport(staging, next(self._serials))
        except SplitserveError as error:
            raise TransferFailed(f"no staging area for {layout}: {error.message}") from error
        return StagingArea(JointReads(transport), PoolView(staging, layout), self._clock)


class DirectFetch:
    """The `TokenFetch` of a read into one's own pool."""

    def __init__(
        self,
        handle: FetchHandle,
        memory: PoolMemory,
        indices: range,
        local_blocks: Sequence[BlockId],
        checksum: TakeChecksums | None,
    ) -> None:
        self._handle = handle
        self._memory = memory
        self._indices = indices
        self._local_blocks = local_blocks
        self._checksum = checksum

    @property
    def num_bytes(self) -> int:
        return self._handle.num_bytes

    def poll(self) -> FetchStatus:
        return self._handle.poll()

    def release(self) -> None:
        self._handle.release()

    def checksums(self) -> dict[int, int]:
        if self._checksum is None:
            return {}
        return dict(zip(self._indices, self._checksum(self._memory, self._local_blocks), strict=True))


def _is_alike(mine: Fingerprint, theirs: Fingerprint) -> bool:
    return (mine.block_size, mine.kv_dtype) == (theirs.block_size, theirs.kv_dtype)


def _row_bytes(memory: PoolMemory, rows: int, fingerprint: Fingerprint) -> int:
    row_bytes, rest = divmod(memory.block_bytes, rows)
    if rest:
        raise StartupError(
            f"blocks of {memory.block_bytes} bytes cannot hold {rows} rows of KV, as {fingerprint} has them"
        )
    return row_bytes
