"""Who accepts on the public port while one router takes over from another?

    old: bind ──> offer the socket ──> told to end: withdraw the offer, accept no more ──> finish ──> gone
    new: ask for the socket ──> accept on it, too, once ready ──> offer it, once the old one withdrew

Both hold one and the same socket, and so whatever waits in its queue is accepted by the one that stays.
With a socket each, the kernel resets the connections in the queue of the one that is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from dataclasses import dataclass

from protocol.errors import StartupError

HANDOVER_S = 2.0
"""How long the old router may take to answer; then the new one opens a socket of its own."""
RETRY_S = 0.2
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Listen:
    """Where a router listens."""

    host: str
    port: int
    """0 takes a free one."""


def bind(listen: Listen) -> socket.socket:
    """The socket of the router that listens there already, or else one of our own.

    Several routers of one host share the port either way. Raises `StartupError` when the port is taken,
    but for one that another program of this user shares, too: whoever starts the first router looks before
    (`cluster.serve_port.with_free_port`). Blocks for up to HANDOVER_S.
    """
    return _inherit(listen) or _open(listen)


def _resolve(listen: Listen) -> tuple[str, int]:
    """As `getsockname` tells it once bound. Raises `OSError`."""
    host, port = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)[0][4][:2]
    return str(host), int(port)


def _open(listen: Listen) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((listen.host, listen.port))
    except OSError as error:
        listener.close()
        raise StartupError(
            f"cannot listen on {listen.host}:{listen.port}: {error.strerror}; choose another --port"
        ) from error
    return listener


def _inherit(listen: Listen) -> socket.socket | None:
    """From a router of this user in this network namespace; None when there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.settimeout(HANDOVER_S)
        try:
            channel.connect(_offer_address(*_resolve(listen)))
            if not _is_of_this_user(channel):
                return None
            _, descriptors, _, _ = socket.recv_fds(channel, 1, maxfds=1)
        except OSError:
            return None
    if not descriptors:
        return None
    return socket.socket(fileno=descriptors[0])


class Offer:
    """Gives the socket to every router that asks for it, until withdrawn. Used on one event loop.

    While the one that this one got it from offers it still, this one waits for its turn.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._channel.setblocking(False)
        self._retry: asyncio.TimerHandle | None = None
        self._begin()

    def _begin(self) -> None:
        if _took_address(self._channel, _offer_address(*self._listener.getsockname()[:2])):
            self._channel.listen()
            self._loop.add_reader(self._channel.fileno(), self._give)
        else:
            self._retry = self._loop.call_later(RETRY_S, self._begin)

    def _give(self) -> None:
        try:
            peer, _ = self._channel.accept()
        except OSError:
            return  # it went away again
        with peer:
            if _is_of_this_user(peer):
                with contextlib.suppress(OSError):  # it did not wait; it opens one of its own then
                    socket.send_fds(peer, [b"\0"], [self._listener.fileno()])

    def withdraw(self) -> None:
        """Idempotent."""
        if self._retry is not None:
            self._retry.cancel()
        if self._channel.fileno() >= 0:
            self._loop.remove_reader(self._channel.fileno())
            self._channel.close()


def _took_address(channel: socket.socket, address: bytes) -> bool:
    try:
        channel.bind(address)
    except OSError:
        return False
    return True


def _offer_address(host: str, port: int) -> bytes:
    """In Linux' abstract name space, which ends where the port's does: at the network namespace."""
    return f"\0splitserve-router-{host}-{port}".encode()


def _is_of_this_user(channel: socket.socket) -> bool:
    """Anybody on the host may take or ask such an address."""
    raw = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.getuid())
