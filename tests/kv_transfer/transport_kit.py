"""What the tests of all transports share: pools with known bytes, and transports that get closed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import count

from kv_transfer import LoopbackNetwork, PoolMemory, agent_name, create_transport
from protocol.ids import BlockId, WorkerId, WorkerIdentity
from protocol.ports import FetchHandle, FetchStatus, KvTransport

WAIT_LIMIT_S = 20.0
_names = count()


def new_agent_name() -> str:
    return agent_name(WorkerIdentity(WorkerId(f"worker-{next(_names)}"), "incarnation-1"), rank=0)


def blocks(*ids: int) -> list[BlockId]:
    return [BlockId(i) for i in ids]


def filled_pool(num_blocks: int, block_bytes: int, salt: int) -> PoolMemory:
    """A pool of which every block holds bytes of its own."""
    memory = PoolMemory.allocate(num_blocks, block_bytes)
    for block_id in range(num_blocks):
        memory.block_view(BlockId(block_id))[:] = block_content(block_bytes, salt, block_id)
    return memory


def block_content(block_bytes: int, salt: int, block_id: int) -> bytes:
    return bytes((salt + 31 * block_id + 7 * i) % 256 for i in range(block_bytes))


def content(memory: PoolMemory) -> list[bytes]:
    return [bytes(memory.block_view(BlockId(i))) for i in range(memory.num_blocks)]


def finish(handle: FetchHandle) -> FetchStatus:
    """Poll until the read is terminal, then give it back."""
    until = time.monotonic() + WAIT_LIMIT_S
    while handle.poll() is FetchStatus.PENDING:
        assert time.monotonic() < until, "the read never ended"
    handle.release()
    return handle.poll()


def all_finish(handles: Iterable[FetchHandle]) -> set[FetchStatus]:
    return {finish(handle) for handle in handles}


class ManualClock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


Wrap = Callable[[KvTransport, PoolMemory], KvTransport]


class Wire:
    """Makes transports of one kind that can reach each other, and closes them."""

    def __init__(self, kind: str, wrap: Wrap = lambda transport, memory: transport) -> None:
        """`wrap` is laid around each transport."""
        self.kind = kind
        self.network = LoopbackNetwork()
        self._wrap = wrap
        self._transports: list[KvTransport] = []

    def attach(self, memory: PoolMemory, agent: str | None = None) -> KvTransport:
        plain = create_transport(self.kind, memory, agent or new_agent_name(), network=self.network)
        transport = self._wrap(plain, memory)
        self._transports.append(transport)
        return transport

    def close(self) -> None:
        """Fails when a read is still pending: nothing may leak."""
        for transport in self._transports:
            transport.close()
