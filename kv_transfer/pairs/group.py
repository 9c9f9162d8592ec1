"""What carries the bytes? A torch.distributed process group of two: Gloo for host memory, NCCL for GPUs.

Groups are objects, and none is the process's global one. What they must tell each other before they are
connected goes over the channel of the two, and so only to whoever knows the owner's secret.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import distributed_c10d

from kv_transfer.memory import MemoryKind, PoolMemory
from kv_transfer.pairs.channel import GREETING_LIMIT_S, Channel
from kv_transfer.pairs.messages import DEVICE_CUT, HOST_CUT, Cut
from protocol.errors import StartupError, TransferFailed

GLOO, NCCL = "gloo", "nccl"
OWNER, READER = 0, 1
"""The ranks of the two."""
MESSAGE_LIMIT_S = 30.0
"""One message may take so long, not a read: a slow link is no dead one."""

_LOOK_UP_S = 0.0002
_STORE_FRAME = b"S"
_BLOCKS, _NOTHING = 0, 1
"""Tags of Gloo's messages; of the second kind there is never one."""


class Pair(Protocol):
    """One side's end of a group of two. One thread uses it, any may `abort` it.

    All of it raises `TransferFailed` once the other side, or `abort`, has ended it.
    """

    def send(self, part: torch.Tensor) -> Any:
        """Begin; `part` is not to be written before `wait` has returned."""

    def recv(self, part: torch.Tensor) -> Any:
        """Begin; `part` may be written until `wait` has returned, or what this returned is dropped."""

    def wait(self, work: Any) -> None:
        """Until the bytes are where they belong."""

    def settle(self) -> None:
        """Until what was copied after the last `wait` is where it belongs, too."""

    def abort(self) -> None:
        """Idempotent: who waits is told. Nothing is written by this group any more."""


class Fabric(Protocol):
    """A kind of groups, over one pool."""

    pool: torch.Tensor  # [num_bytes], uint8: the pool itself
    cut: Cut

    def pair(self, channel: Channel, rank: int) -> Pair:
        """Waits for the other side, within bounds. Raises `TransferFailed`."""

    def close(self) -> None:
        """Idempotent. What all groups share goes with the last of them."""


def make_fabric(kind: str, memory: PoolMemory, host: str) -> Fabric:
    """Raises `StartupError`, which says what to do."""
    return NcclFabric(memory) if kind == NCCL else GlooFabric(memory, host)


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
        return GlooPair(_started(lambda: self._gloo(store, rank, 2, options)), 1 - rank, store)

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
        _translated(lambda: work.wait(timedelta(seconds=MESSAGE_LIMIT_S)))

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
        return _translated(lambda: begin(group))


class NcclFabric:
    """Pools in GPU memory, over what NCCL finds: NVLink, RDMA, TCP. Has not met a GPU yet.

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
        group = _started(lambda: self._nccl(store, rank, 2, options))
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
        return _translated(lambda: self._group.send([part], self._peer, 0))

    def recv(self, part: torch.Tensor) -> Any:
        return _translated(lambda: self._group.recv([part], self._peer, 0))

    def wait(self, work: Any) -> None:
        until_s = time.monotonic() + MESSAGE_LIMIT_S
        while not _translated(work.is_completed):
            if time.monotonic() > until_s:
                self.abort()
                raise TransferFailed(f"a message took over {MESSAGE_LIMIT_S:g} s")
            time.sleep(_LOOK_UP_S)
        _translated(work.wait)  # says how it ended; nothing is left to wait for

    def settle(self) -> None:
        _translated(torch.accelerator.current_stream(self._device).synchronize)

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


class ChannelStore(distributed_c10d.Store):
    """The store of a group of two: what one side sets is sent to the other."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = raw
        name = key.encode()
        self._channel.send(_STORE_FRAME + len(name).to_bytes(2, "little") + name + raw)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        until_s = time.monotonic() + (timeout.total_seconds() if timeout else GREETING_LIMIT_S)
        while not self.check(keys):
            self._take(self._channel.recv(until_s - time.monotonic()))

    def _take(self, frame: bytes) -> None:
        if frame[:1] != _STORE_FRAME:
            raise TransferFailed("the other side spoke before the two were connected")
        size = int.from_bytes(frame[1:3], "little")
        self._values[frame[3 : 3 + size].decode()] = frame[3 + size :]


def _started(start: Callable[[], Any]) -> Any:
    try:
        return start()
    except RuntimeError as error:
        raise TransferFailed(f"the two do not come together: {error}") from error


def _translated(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as error:
        raise TransferFailed(f"the group is lost: {error}") from error
