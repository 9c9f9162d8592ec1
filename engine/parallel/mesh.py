"""How does each rank of a group get a connection to each other one? Through a store with their addresses.

each rank    listens, and puts its address and a secret of its own into the store
rank r       connects to the ranks before it, tells the secret of each and who it is
             accepts those after it that know its secret; others are hung up on
"""

from __future__ import annotations

import secrets
import socket
import struct
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_SECRET_BYTES = 16
_HELLO = struct.Struct(f"<{_SECRET_BYTES}sI")
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


def meet(store: Store, rank: int, num_ranks: int, host: str, limit_s: float) -> Connections:
    """Wait for all. Raises `OSError` or `RuntimeError` for those that do not come within `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    secret = secrets.token_bytes(_SECRET_BYTES)
    found: dict[int, socket.socket] = {}
    try:
        with socket.create_server((host, 0), family=_family(host), backlog=num_ranks) as listener:
            store.set(f"address {rank}", f"{secret.hex()} {listener.getsockname()[1]} {host}")
            for other in range(rank):
                found[other] = _call(store, rank, other, deadline_s)
            while len(found) < num_ranks - 1:
                _accept(listener, secret, range(rank + 1, num_ranks), found, deadline_s)
    except BaseException:
        Connections(found).close()
        raise
    return Connections(found)


def _call(store: Store, rank: int, other: int, deadline_s: float) -> socket.socket:
    key = f"address {other}"
    store.wait([key], timedelta(seconds=_left_s(deadline_s)))
    secret, port, host = store.get(key).decode().split()
    connection = socket.create_connection((host, int(port)), timeout=_left_s(deadline_s))
    connection.sendall(_HELLO.pack(bytes.fromhex(secret), rank))
    return connection


def _accept(
    listener: socket.socket,
    secret: bytes,
    expected: range,
    found: dict[int, socket.socket],
    deadline_s: float,
) -> None:
    """Add the next one to `found`, unless it is none that is expected."""
    listener.settimeout(_left_s(deadline_s))
    connection, _ = listener.accept()
    other = _hear_hello(connection, secret, min(_HELLO_S, _left_s(deadline_s)))
    if other is not None and other in expected and other not in found:
        found[other] = connection
    else:
        connection.close()


def _hear_hello(connection: socket.socket, secret: bytes, limit_s: float) -> int | None:
    """Who it is; None for a stranger, who may also be silent, or gone."""
    connection.settimeout(limit_s)
    try:
        hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
    except OSError:
        return None
    told, other = _HELLO.unpack(hello.ljust(_HELLO.size, b"\0"))
    return int(other) if secrets.compare_digest(told, secret) else None


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("not all ranks came in time")
    return left_s


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
