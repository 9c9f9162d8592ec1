"""What is asked of NIXL's bindings? One agent, one pool, blocks described once, reads by index.

Written against the bindings and not against NIXL's Python agent, which fixes the progress thread's wait
at 0 and so keeps a core busy. Raises what the bindings raise; `kv_transfer.nixl` translates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_transfer.memory import MemoryKind, PoolMemory
from kv_transfer.nixl_metadata import NixlMetadata
from kv_transfer.peers import Connection
from kv_transfer.spans import whole_block
from protocol.ids import BlockId

Part = tuple[int, int]
"""(offset, bytes) of a block."""


@dataclass(frozen=True, slots=True)
class PreparedPeer:
    """Handles of the two lists that describe what is read of a peer's blocks, and where it goes.

    In either of them, block b of part p is entry p * blocks of that pool + b.
    """

    remote_list: int
    local_list: int
    num_parts: int
    num_remote_blocks: int


class NixlAgent:
    """One NIXL agent with one registered pool. Raises NIXL's own errors."""

    def __init__(self, bindings: Any, name: str, memory: PoolMemory, progress_interval_s: float) -> None:
        self._bindings = bindings
        self._memory = memory
        self._agent: Any = bindings.nixlAgent(name, agent_config(bindings, progress_interval_s))
        self._backends = [self._agent.createBackend("UCX", {})]
        segment = (memory.address, memory.num_bytes, memory.device_id, b"")
        self._registration = bindings.nixlRegDList(self._segment_kind(memory.kind), [segment])
        self._agent.registerMem(self._registration, self._backends)
        self._local_lists: dict[tuple[Part, ...], int] = {}
        """Shared by all peers of one layout, and kept."""
        self._local_list([(span.my_offset, span.num_bytes) for span in whole_block(memory.block_bytes)])

    def metadata(self, memory: PoolMemory) -> bytes:
        blob = self._agent.getLocalMD()
        return NixlMetadata(memory.address, memory.kind, memory.device_id, blob).to_bytes()

    def add_peer(self, connection: Connection, metadata: NixlMetadata) -> PreparedPeer:
        """Describe what is read of the peer's blocks.

        What a failure got as far as to load is forgotten. NIXL 1.5 may still refuse that name afterwards:
        the peer then needs a new agent, which a restart gives it.
        """
        loaded = connection.peer.agent
        try:
            loaded = self._agent.loadRemoteMD(metadata.agent_blob).decode()
            _check_name(loaded, connection.peer.agent)
            return self._prepare(connection, metadata)
        except BaseException:
            self._agent.invalidateRemoteMD(loaded)
            raise

    def remove_peer(self, name: str, prepared: PreparedPeer) -> None:
        self._agent.releasedDlistH(prepared.remote_list)
        self._agent.invalidateRemoteMD(name)  # says if it was gone already, and does not raise

    def make_read(
        self, peer: PreparedPeer, remote_blocks: Sequence[BlockId], local_blocks: Sequence[BlockId]
    ) -> int:
        """Returns the handle of a request that is not yet posted."""
        handle: int = self._agent.makeXferReq(
            self._bindings.NIXL_READ,
            peer.local_list,
            _entries(local_blocks, self._memory.num_blocks, peer.num_parts),
            peer.remote_list,
            _entries(remote_blocks, peer.num_remote_blocks, peer.num_parts),
            b"",
            self._backends,
        )
        return handle

    def post(self, handle: int) -> bool:
        """True when the read is done already."""
        return bool(self._agent.postXferReq(handle) == self._bindings.NIXL_SUCCESS)

    def check(self, handle: int) -> bool:
        """True when the read is done."""
        return bool(self._agent.getXferStatus(handle) == self._bindings.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        self._agent.releaseXferReq(handle)

    def close(self) -> None:
        """Idempotent. Without the agent's end its progress thread would go on."""
        if self._agent is None:
            return
        for local_list in self._local_lists.values():
            self._agent.releasedDlistH(local_list)
        self._agent.deregisterMem(self._registration, self._backends)
        self._agent = None

    def _prepare(self, connection: Connection, metadata: NixlMetadata) -> PreparedPeer:
        peer, spans = connection.peer, connection.spans
        local_list = self._local_list([(span.my_offset, span.num_bytes) for span in spans])
        pool = PoolMemory(
            metadata.address, peer.pool.num_blocks, peer.pool.block_bytes, metadata.kind, metadata.device_id
        )
        remote_list = self._describe(
            peer.agent, pool, [(span.their_offset, span.num_bytes) for span in spans]
        )
        return PreparedPeer(remote_list, local_list, len(spans), pool.num_blocks)

    def _local_list(self, parts: Sequence[Part]) -> int:
        key = tuple(parts)
        if key not in self._local_lists:
            self._local_lists[key] = self._describe(self._bindings.NIXL_INIT_AGENT, self._memory, parts)
        return self._local_lists[key]

    def _describe(self, agent: str, pool: PoolMemory, parts: Sequence[Part]) -> int:
        """Prepare one descriptor per block and part, as one strided row for each part."""
        rows = [
            (pool.address + offset, num_bytes, pool.device_id, pool.block_bytes, pool.num_blocks)
            for offset, num_bytes in parts
        ]
        handle: int = self._agent.prepXferDlist(
            agent, self._segment_kind(pool.kind), np.array(rows, dtype=np.uint64), self._backends
        )
        return handle

    def _segment_kind(self, kind: MemoryKind) -> Any:
        kinds = {MemoryKind.HOST: self._bindings.DRAM_SEG, MemoryKind.DEVICE: self._bindings.VRAM_SEG}
        return kinds[kind]


def _entries(blocks: Sequence[BlockId], num_blocks: int, num_parts: int) -> NDArray[np.int32]:
    """All parts of these blocks in a prepared list, block by block."""
    of_block = np.asarray(blocks, dtype=np.int32)[:, None]
    return (of_block + num_blocks * np.arange(num_parts, dtype=np.int32)).ravel()


def agent_config(bindings: Any, progress_interval_s: float) -> Any:
    """The `nixlAgentConfig` of an agent that is served by its own thread and does not spin."""
    config = bindings.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = max(1, round(progress_interval_s * 1e6))  # 0 would spin
    config.useListenThread = False
    config.syncMode = bindings.NIXL_THREAD_SYNC_NONE  # one thread calls us
    config.captureTelemetry = False
    return config


def _check_name(found: str, expected: str) -> None:
    if found != expected:
        raise ValueError(f"the metadata is that of {found}")
