"""What does it take to move so many bytes without a cluster? By memcpy, and by a transport alone.

`python benchmarks/raw_transfer.py` lets NIXL and Gloo take turns, between the same two processes.

The owner of the bytes is a process of its own, as a prefill worker is. A read is timed from its post to
the first poll that finds it done; nobody sleeps in between, except where threads of the reader's process
need Python for the read themselves.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
    pause_s: float = 0.0
    """Between two polls."""

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
            if self.pause_s:
                time.sleep(self.pause_s)
        taken_s = time.perf_counter() - started_s
        assert status is FetchStatus.DONE, status
        handle.release()
        return taken_s


@contextmanager
def raw_readers(
    num_bytes: int, counts: Sequence[int], *, kind: str = "nixl", pause_s: float = 0.0
) -> Iterator[list[RawReader]]:
    """Readers of `num_bytes` in so many pieces each. They share their memory, on either side."""
    override(ON_LOOPBACK)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_own, args=(theirs, num_bytes, list(counts), kind), daemon=True)
    process.start()
    transports = _transports("reader", num_bytes, counts, kind)
    try:
        yield [
            _connected(transport, ours, n, pause_s) for transport, n in zip(transports, counts, strict=True)
        ]
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


def _connected(transport: KvTransport, pipe: Connection, num_pieces: int, pause_s: float) -> RawReader:
    endpoint = endpoint_from_wire(pb.TransportEndpoint.FromString(pipe.recv_bytes()))
    transport.connect(endpoint)
    return RawReader(transport, endpoint.agent, num_pieces, pause_s)


def _transports(name: str, num_bytes: int, counts: Sequence[int], kind: str) -> list[KvTransport]:
    """One per count, over the same memory. Every page is there: no read waits for the kernel to make it."""
    room = num_bytes + num_bytes // min(counts)  # the first piece is the null block, which nobody reads
    array = np.full(room, 7, dtype=np.uint8)
    pools = [PoolMemory(array.ctypes.data, n + 1, num_bytes // n, owner=array) for n in counts]
    return [create_transport(kind, pool, f"{name}/{uuid4().hex}") for pool in pools]


def _own(pipe: Connection, num_bytes: int, counts: list[int], kind: str) -> None:
    """The other process: lives until the pipe is closed."""
    transports = _transports("owner", num_bytes, counts, kind)
    for transport in transports:
        pipe.send_bytes(endpoint_to_wire(transport.endpoint).SerializeToString())
    pipe.poll(None)
    for transport in transports:
        transport.close()


def main(num_bytes: int = 45 * 2**19, num_pieces: int = 32, num_rounds: int = 40) -> None:
    """A prompt of the demo model with 512 tokens, by each transport in turn, with memcpy beside it."""
    seconds: dict[str, list[float]] = {"memcpy": [], "nixl": [], "gloo": []}
    with ExitStack() as ends:
        readers = {
            kind: ends.enter_context(raw_readers(num_bytes, [num_pieces], kind=kind, pause_s=2e-4))[0]
            for kind in ("nixl", "gloo")
        }
        for _ in range(num_rounds):
            seconds["memcpy"].append(memcpy_s(num_bytes))
            for kind, reader in readers.items():
                seconds[kind].append(reader.read_s(shuffled=True))
    print(f"{num_bytes / 2**20:g} MiB in {num_pieces} pieces, {num_rounds} rounds")
    for kind, taken in seconds.items():
        least, median = min(taken), statistics.median(taken)
        print(f"{kind:7}least {1e3 * least:6.1f} ms {num_bytes / least / 1e9:5.2f} GB/s", end="")
        print(f"   median {1e3 * median:6.1f} ms {num_bytes / median / 1e9:5.2f} GB/s")


if __name__ == "__main__":
    main()
