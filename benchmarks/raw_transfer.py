"""What does it take to move so many bytes without a cluster? By memcpy, and by NIXL alone.

The owner of the bytes is a process of its own, as a prefill worker is. A read is timed from its post to
the first poll that finds it done; nobody sleeps in between.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from uuid import uuid4

import numpy as np

from cluster.environment import override
from kv_transfer import PoolMemory, create_transport
from protocol.codec import endpoint_from_wire, endpoint_to_wire
from protocol.ids import BlockId
from protocol.ports import FetchStatus, KvTransport
from protocol.wire import splitserve_pb2 as pb

ON_LOOPBACK = {"UCX_NET_DEVICES": "lo"}
"""As local clusters have it."""
END_S = 10.0


@dataclass(frozen=True)
class RawReader:
    """Pieces of one size here, as many in another process, and a connection between them."""

    transport: KvTransport
    owner: str
    num_pieces: int

    def read_s(self, *, shuffled: bool) -> float:
        """Seconds for all pieces once; shuffled: scattered on both sides, as in pools that were used."""
        remote, local = list(range(1, self.num_pieces + 1)), list(range(1, self.num_pieces + 1))
        if shuffled:
            random.Random(1).shuffle(remote)
            random.Random(2).shuffle(local)
        return self._read_s([BlockId(i) for i in remote], [BlockId(i) for i in local])

    def _read_s(self, remote: Sequence[BlockId], local: Sequence[BlockId]) -> float:
        started_s = time.perf_counter()
        handle = self.transport.fetch(self.owner, remote, local)
        while (status := handle.poll()) is FetchStatus.PENDING:
            pass
        taken_s = time.perf_counter() - started_s
        assert status is FetchStatus.DONE, status
        handle.release()
        return taken_s


@contextmanager
def raw_readers(num_bytes: int, counts: Sequence[int]) -> Iterator[list[RawReader]]:
    """Readers of `num_bytes` in so many pieces each. They share their memory, on either side."""
    override(ON_LOOPBACK)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_own, args=(theirs, num_bytes, list(counts)), daemon=True)
    process.start()
    transports = _transports("reader", num_bytes, counts)
    try:
        yield [_connected(transport, ours, n) for transport, n in zip(transports, counts, strict=True)]
    finally:
        for transport in transports:
            transport.close()
        ours.close()
        process.join(END_S)


def memcpy_s(num_bytes: int) -> float:
    """Seconds to copy so many bytes within this process, on one thread."""
    source = np.full(num_bytes, 7, dtype=np.uint8)
    target = np.ones_like(source)
    started_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started_s


def _connected(transport: KvTransport, pipe: Connection, num_pieces: int) -> RawReader:
    endpoint = endpoint_from_wire(pb.TransportEndpoint.FromString(pipe.recv_bytes()))
    transport.connect(endpoint)
    return RawReader(transport, endpoint.agent, num_pieces)


def _transports(name: str, num_bytes: int, counts: Sequence[int]) -> list[KvTransport]:
    """One per count, over the same memory. Every page is there: no read waits for the kernel to make it."""
    room = num_bytes + num_bytes // min(counts)  # the first piece is the null block, which nobody reads
    array = np.full(room, 7, dtype=np.uint8)
    pools = [PoolMemory(array.ctypes.data, n + 1, num_bytes // n, owner=array) for n in counts]
    return [create_transport("nixl", pool, f"{name}/{uuid4().hex}") for pool in pools]


def _own(pipe: Connection, num_bytes: int, counts: list[int]) -> None:
    """The other process: lives until the pipe is closed."""
    transports = _transports("owner", num_bytes, counts)
    for transport in transports:
        pipe.send_bytes(endpoint_to_wire(transport.endpoint).SerializeToString())
    pipe.poll(None)
    for transport in transports:
        transport.close()
