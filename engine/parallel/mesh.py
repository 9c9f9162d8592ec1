"""How does each rank of a group get a connection to each other one? Through a store with their addresses.

each rank    listens, and puts its address into the store, which strangers may read
rank r       connects to the ranks before it, says who it is, and proves that it has the worker's key
             accepts those after it that do so; others are hung up on
"""

from __future__ import annotations

import hmac
import socket
import struct
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_PROOF_BYTES = 32
_HELLO = struct.Struct(f"<{_PROOF_BYTES}sI")
_HELLO_S = 2.0
"""A rank says who it is at once."""


class Connections:
    """Of one rank, by the rank at the other end. They do not block, and send at once."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = sockets
        for connection in sockets.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)

    def __getitem__(self, rank: int) -> socket.socket:
        return self._sockets[rank]

    def shut_down(self) -> None:
        """From any thread: whoever waits at either end finds the connections closed. Idempotent."""
        for connection in self._sockets.values():
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # it is down already
                continue

    def close(self) -> None:
        """By the thread that uses them. Idempotent."""
        self.shut_down()
        for connection in self._sockets.values():
            connection.close()


def meet(store: Store, rank: int, num_ranks: int, *, host: str, limit_s: float, key: bytes) -> Connections:
    """Wait for all; `key` is what no stranger knows.

    Raises `OSError` or `RuntimeError` for those that do not come within `limit_s`.
    """
    deadline_s = time.monotonic() + limit_s
    found: dict[int, socket.socket] = {}
    try:
        with socket.create_server((host, 0), family=_family(host), backlog=num_ranks) as listener:
            address = f"{listener.getsockname()[1]} {host}"
            store.set(f"address {rank}", address)
            for other in range(rank):
                found[other] = _call(store, rank, other, key, deadline_s)
            while len(found) < num_ranks - 1:
                other, connection = _accept(listener, address, key, deadline_s)
                if rank < other < num_ranks and other not in found:
                    found[other] = connection
                else:
                    connection.close()
    except BaseException:
        Connections(found).close()
        raise
    return Connections(found)


def _call(store: Store, rank: int, other: int, key: bytes, deadline_s: float) -> socket.socket:
    name = f"address {other}"
    store.wait([name], timedelta(seconds=_left_s(deadline_s)))
    address = store.get(name).decode()
    port, host = address.split()
    connection = socket.create_connection((host, int(port)), timeout=_left_s(deadline_s))
    connection.sendall(_HELLO.pack(_proof(key, rank, address), rank))
    return connection


def _accept(
    listener: socket.socket, address: str, key: bytes, deadline_s: float
) -> tuple[int, socket.socket]:
    """The next one, with the rank that it is; -1 for a stranger, who may also be silent, or gone."""
    listener.settimeout(_left_s(deadline_s))
    connection, _ = listener.accept()
    connection.settimeout(min(_HELLO_S, _left_s(deadline_s)))
    try:
        hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
    except OSError:
        return -1, connection
    told, other = _HELLO.unpack(hello.ljust(_HELLO.size, b"\0"))
    return (other if hmac.compare_digest(told, _proof(key, other, address)) else -1), connection


def _proof(key: bytes, caller: int, address: str) -> bytes:
    """Of one who has the key, for this call alone: a port is not used twice while anybody remembers it."""
    return hmac.digest(key, f"{caller} {address}".encode(), "sha256")


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("not all ranks came in time")
    return left_s


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
