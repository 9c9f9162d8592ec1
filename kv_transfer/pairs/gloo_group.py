"""How do bytes move between two pools in host memory? By Gloo, over TCP, from pool to pool."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

from kv_transfer.memory import MemoryKind, PoolMemory
from kv_transfer.pairs.channel import GREETING_LIMIT_S, Channel
from kv_transfer.pairs.group import MESSAGE_LIMIT_S, Pair, started, translated
from kv_transfer.pairs.messages import HOST_CUT
from kv_transfer.pairs.store import ChannelStore
from protocol.errors import StartupError, TransferFailed

_BLOCKS, _NOTHING = 0, 1
"""Tags of the messages; of the second kind there is never one."""


class GlooFabric:
    """Pools in host memory, over TCP."""

    cut = HOST_CUT

    def __init__(self, memory: PoolMemory, host: str) -> None:
        """`host` is this machine's address, as readers and owners reach it."""
        if memory.kind is not MemoryKind.HOST:
            raise StartupError(
                "kv_transfer.transport: gloo moves host memory only, and this pool is on a GPU: set it to "
                "nixl, or to nccl"
            )
        self._gloo: Any = distributed_c10d.ProcessGroupGloo
        try:
            self._device: Any = self._gloo.create_device(hostname=host)
        except RuntimeError as error:
            raise StartupError(f"gloo cannot use the address {host}: {error}") from error
        self._memory = memory  # the tensor does not keep it alive
        buffer = (ctypes.c_char * memory.num_bytes).from_address(memory.address)
        self.pool = torch.frombuffer(buffer, dtype=torch.uint8)

    def pair(self, channel: Channel, rank: int) -> Pair:
        options = self._gloo._Options()
        options._timeout = timedelta(seconds=GREETING_LIMIT_S)
        options._threads = 1  # none of our calls uses it
        if self._device is None:
            raise TransferFailed("the transport is closed")
        options._devices = [self._device]  # one thread for all groups
        store = ChannelStore(channel)
        return GlooPair(started(lambda: self._gloo(store, rank, 2, options)), 1 - rank, store)

    def close(self) -> None:
        self._device = None


class GlooPair:
    """Messages between the pools themselves: nothing is copied on the way."""

    def __init__(self, group: Any, peer: int, store: ChannelStore) -> None:
        self._group: Any = group
        self._peer = peer
        self._store = store  # the group holds it, but not its Python half

    def send(self, part: torch.Tensor) -> Any:
        return self._begun(lambda group: group.send([part], self._peer, _BLOCKS))

    def recv(self, part: torch.Tensor) -> Any:
        return self._begun(lambda group: group.recv([part], self._peer, _BLOCKS))

    def wait(self, work: Any) -> None:
        translated(lambda: work.wait(timedelta(seconds=MESSAGE_LIMIT_S)))

    def settle(self) -> None:
        """Copies in host memory are done when they return."""

    def abort(self) -> None:
        """Gloo's own `abort` leaves those who wait waiting, here and there. A wait that runs out of time
        ends the connection, and so all that wait for it."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], self._peer, _NOTHING).wait(timedelta(milliseconds=1))

    def _begun(self, begin: Callable[[Any], Any]) -> Any:
        group = self._group
        if group is None:
            raise TransferFailed("the group was ended")
        return translated(lambda: begin(group))
