"""How do reader and owner talk beside the blocks? In frames over one TCP connection, once each has shown
that it knows the owner's secret.

    owner                                        reader
      |------------------ nonce ------------------>|
      |<---- nonce, proof of both, what for -------|    a wrong proof: the owner hangs up
      |------------------ proof ------------------>|    a wrong proof: another process has the port now
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time

from protocol.errors import TransferFailed

GREETING_LIMIT_S = 10.0
"""For connect and handshake. An owner is at work all the time, so one that takes longer is not there."""
MAX_FRAME_BYTES = 64 * 2**20
MAX_GREETING_BYTES = 2**20
NONCE_BYTES = PROOF_BYTES = 32

_LENGTH = struct.Struct("<I")
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A host that vanished while nothing was under way is noticed after 25 s."""


class Channel:
    """One connection. `send` may be called from any thread, `recv` from one; all else is bounded by it.

    All of it raises `TransferFailed` once the other side, or `hang_up`, has ended it.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Owns `connection`. Raises `OSError`, and has closed it, when it is over already."""
        self._socket = connection
        self._sending = threading.Lock()
        try:
            self._prepare()
        except OSError:
            connection.close()
            raise

    @classmethod
    def open(cls, host: str, port: int) -> Channel:
        """Raises `TransferFailed`."""
        try:
            return cls(socket.create_connection((host, port), GREETING_LIMIT_S))
        except OSError as error:
            raise TransferFailed(f"nobody answers at {host}, port {port}: {error}") from error

    def send(self, frame: bytes) -> None:
        try:
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(frame)) + frame)
        except OSError as error:
            raise TransferFailed(f"the connection is lost: {error}") from error

    def recv(self, limit_s: float | None, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
        """The next frame. None waits for as long as the connection lives, which the system watches."""
        until_s = None if limit_s is None else time.monotonic() + limit_s
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, until_s))
        if length > max_bytes:
            raise TransferFailed(f"a frame of {length} bytes is no frame of ours")
        return self._exactly(length, until_s)

    def hang_up(self) -> None:
        """Idempotent, from any thread: whoever sends or waits, on either side, is told."""
        with contextlib.suppress(OSError):  # it is over already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent, from the thread that receives."""
        self.hang_up()
        self._socket.close()

    def _prepare(self) -> None:
        connection = self._socket
        connection.settimeout(None)  # the two directions have limits of their own, below
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _time_value(GREETING_LIMIT_S))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # not all systems have all of them
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def _exactly(self, num_bytes: int, until_s: float | None) -> bytes:
        parts, missing = [], num_bytes
        while missing:
            part = self._some(missing, until_s)
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _some(self, most: int, until_s: float | None) -> bytes:
        try:
            left_s = 0.0 if until_s is None else max(1e-3, until_s - time.monotonic())
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _time_value(left_s))
            part = self._socket.recv(min(most, 2**16))
        except BlockingIOError as error:
            raise TransferFailed("the other side does not answer") from error
        except OSError as error:
            raise TransferFailed(f"the connection is lost: {error}") from error
        if not part:
            raise TransferFailed("the other side hung up")
        return part


def greet_reader(channel: Channel, secret: bytes) -> bytes:
    """As the owner: what the reader comes for. Raises `TransferFailed` for one that may not read."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    channel.send(nonce)
    answer = channel.recv(GREETING_LIMIT_S, MAX_GREETING_BYTES)
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES : NONCE_BYTES + PROOF_BYTES]
    wish = answer[NONCE_BYTES + PROOF_BYTES :]
    if not hmac.compare_digest(proof, _prove(secret, b"reader", nonce, theirs, wish)):
        raise TransferFailed("a reader that does not know the secret is turned away")
    channel.send(_prove(secret, b"owner", nonce, theirs, wish))
    return wish


def greet_owner(channel: Channel, secret: bytes, wish: bytes) -> None:
    """As the reader. Raises `TransferFailed` when the owner does not let it in, or is another one."""
    nonce = channel.recv(GREETING_LIMIT_S, MAX_GREETING_BYTES)
    mine = secrets.token_bytes(NONCE_BYTES)
    channel.send(mine + _prove(secret, b"reader", nonce, mine, wish) + wish)
    proof = channel.recv(GREETING_LIMIT_S, MAX_GREETING_BYTES)
    if not hmac.compare_digest(proof, _prove(secret, b"owner", nonce, mine, wish)):
        raise TransferFailed("another process listens where the owner did")


def _prove(secret: bytes, role: bytes, owner_nonce: bytes, reader_nonce: bytes, wish: bytes) -> bytes:
    """Lengths are hashed too: no two sets of parts are one text."""
    parts = (role, owner_nonce, reader_nonce, wish)
    text = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return hmac.digest(secret, text, "sha256")


def _time_value(seconds: float) -> bytes:
    """As the system's `struct timeval`; 0 is no limit."""
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
