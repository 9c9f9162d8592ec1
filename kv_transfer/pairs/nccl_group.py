"""How do bytes move between two pools in GPU memory? By NCCL; has not met a GPU yet."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

from kv_transfer.memory import MemoryKind, PoolMemory
from kv_transfer.pairs.channel import Channel
from kv_transfer.pairs.group import MESSAGE_LIMIT_S, OWNER, Pair, started, translated
from kv_transfer.pairs.messages import DEVICE_CUT
from kv_transfer.pairs.store import ChannelStore
from protocol.errors import StartupError, TransferFailed

_LOOK_UP_S = 0.0002


class NcclFabric:
    """Pools in GPU memory.

    A group's two pools must be on two GPUs. What NCCL does about a lost peer is up to the process's
    environment (`cluster.environment.NCCL_OUTLIVES_PEERS`): by its default it ends the process.
    """

    cut = DEVICE_CUT

    def __init__(self, memory: PoolMemory) -> None:
        if memory.kind is not MemoryKind.DEVICE:
            raise StartupError(
                "kv_transfer.transport: nccl moves GPU memory only, and this pool is in host memory: set "
                "it to nixl, or to gloo, or give all workers GPUs (num_gpus)"
            )
        self._nccl: Any = getattr(distributed_c10d, "ProcessGroupNCCL", None)
        if self._nccl is None:
            raise StartupError(
                "kv_transfer.transport: nccl needs a CUDA build of torch: install one, or set it to nixl"
            )
        self._memory = memory
        self._device = torch.device("cuda", memory.device_id)
        self.pool = torch.as_tensor(_CudaBytes(memory), device=self._device)

    def pair(self, channel: Channel, rank: int) -> Pair:
        options = self._nccl.Options()
        options._timeout = timedelta(days=1)  # its watchdog ends more than a group: `NcclPair.wait` does it
        store = ChannelStore(channel)
        group = started(lambda: self._nccl(store, rank, 2, options))
        pair = NcclPair(group, 1 - rank, store, self._device)
        hello = torch.zeros(1, dtype=torch.uint8, device=self._device)
        # The first message connects the two, by way of the store.
        pair.wait(pair.send(hello) if rank == OWNER else pair.recv(hello))
        return pair

    def close(self) -> None:
        """Groups on GPUs share nothing of ours."""


class NcclPair:
    """Messages that the GPU moves while a thread of ours looks now and then whether they are there."""

    def __init__(self, group: Any, peer: int, store: ChannelStore, device: torch.device) -> None:
        self._group = group
        self._peer = peer
        self._store = store
        self._device = device

    def send(self, part: torch.Tensor) -> Any:
        return translated(lambda: self._group.send([part], self._peer, 0))

    def recv(self, part: torch.Tensor) -> Any:
        return translated(lambda: self._group.recv([part], self._peer, 0))

    def wait(self, work: Any) -> None:
        until_s = time.monotonic() + MESSAGE_LIMIT_S
        while not translated(work.is_completed):
            if time.monotonic() > until_s:
                self.abort()
                raise TransferFailed(f"a message took over {MESSAGE_LIMIT_S:g} s")
            time.sleep(_LOOK_UP_S)
        translated(work.wait)  # says how it ended; nothing is left to wait for

    def settle(self) -> None:
        translated(torch.accelerator.current_stream(self._device).synchronize)

    def abort(self) -> None:
        self._group.abort()


class _CudaBytes:
    """Memory of a GPU, in the words that torch takes it by."""

    def __init__(self, memory: PoolMemory) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.num_bytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }
