"""What is asked of NIXL's bindings? One agent, one pool, whole pools described once, reads by block index.

Written against the bindings and not against NIXL's Python agent, which fixes the progress thread's wait
at 0 and so keeps a core busy. Raises what the bindings raise; `kv_transfer.nixl` translates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kv_transfer.memory import MemoryKind, PoolMemory
from kv_transfer.nixl_metadata import NixlMetadata
from protocol.handoff import PoolDescription, TransportEndpoint
from protocol.ids import BlockId


class NixlAgent:
    """One NIXL agent with one registered pool. Raises NIXL's own errors."""

    def __init__(self, bindings: Any, name: str, memory: PoolMemory, progress_interval_s: float) -> None:
        self._bindings = bindings
        self._agent: Any = bindings.nixlAgent(name, agent_config(bindings, progress_interval_s))
        self._backends = [self._agent.createBackend("UCX", {})]
        segment = (memory.address, memory.num_bytes, memory.device_id, b"")
        self._registration = bindings.nixlRegDList(self._segment_kind(memory.kind), [segment])
        self._agent.registerMem(self._registration, self._backends)
        self._local_list = self._describe(
            bindings.NIXL_INIT_AGENT, memory.address, memory.kind, memory.device_id, memory.description
        )

    def metadata(self, memory: PoolMemory) -> bytes:
        blob = self._agent.getLocalMD()
        return NixlMetadata(memory.address, memory.kind, memory.device_id, blob).to_bytes()

    def add_peer(self, peer: TransportEndpoint, metadata: NixlMetadata) -> int:
        """Returns the handle of the list that describes the peer's pool.

        What a failure got as far as to load is forgotten. NIXL 1.5 may still refuse that name afterwards:
        the peer then needs a new agent, which a restart gives it.
        """
        loaded = peer.agent
        try:
            loaded = self._agent.loadRemoteMD(metadata.agent_blob).decode()
            _check_name(loaded, peer.agent)
            return self._describe(loaded, metadata.address, metadata.kind, metadata.device_id, peer.pool)
        except BaseException:
            self._agent.invalidateRemoteMD(loaded)
            raise

    def remove_peer(self, name: str, remote_list: int) -> None:
        self._agent.releasedDlistH(remote_list)
        self._agent.invalidateRemoteMD(name)  # says if it was gone already, and does not raise

    def make_read(
        self, remote_list: int, remote_blocks: Sequence[BlockId], local_blocks: Sequence[BlockId]
    ) -> int:
        """Returns the handle of a request that is not yet posted."""
        handle: int = self._agent.makeXferReq(
            self._bindings.NIXL_READ,
            self._local_list,
            np.asarray(local_blocks, dtype=np.int32),
            remote_list,
            np.asarray(remote_blocks, dtype=np.int32),
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
        self._agent.releasedDlistH(self._local_list)
        self._agent.deregisterMem(self._registration, self._backends)
        self._agent = None

    def _describe(
        self, agent: str, address: int, kind: MemoryKind, device_id: int, pool: PoolDescription
    ) -> int:
        """Prepare one descriptor per block, as one strided row."""
        row = (address, pool.block_bytes, device_id, pool.block_bytes, pool.num_blocks)
        handle: int = self._agent.prepXferDlist(
            agent, self._segment_kind(kind), np.array([row], dtype=np.uint64), self._backends
        )
        return handle

    def _segment_kind(self, kind: MemoryKind) -> Any:
        kinds = {MemoryKind.HOST: self._bindings.DRAM_SEG, MemoryKind.DEVICE: self._bindings.VRAM_SEG}
        return kinds[kind]


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
