"""How does an owner serve its blocks? By one thread that lets readers in, and one for each of them.

    accept ──> greet ──> group ──> wait for a request ──> send its blocks ──┐
                  └ refused                   ^────────────────────────────┘
A reader that is slow, frozen or gone costs its own thread, until its limits end it; no other one.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time

from kv_transfer.pairs.channel import Channel, greet_reader
from kv_transfer.pairs.group import OWNER, Fabric, Pair
from kv_transfer.pairs.lane import Lane
from kv_transfer.pairs.messages import messages
from kv_transfer.pairs.metadata import SECRET_BYTES, PairMetadata
from kv_transfer.pairs.wishes import blocks_from_bytes, shape_from_bytes
from protocol.errors import StartupError, TransferFailed
from protocol.handoff import PoolDescription

MAX_READERS = 512
"""At once; more cannot be workers of one cluster, and each takes a thread."""
CLOSE_LIMIT_S = 3.0

logger = logging.getLogger(__name__)


class Owner:
    """Serves one pool to whoever knows the secret, from its construction to `close`."""

    def __init__(self, fabric: Fabric, pool: PoolDescription, agent: str, host: str) -> None:
        """Listens on `host`, at a port of the system's choice. Raises `StartupError`."""
        self._fabric = fabric
        self._pool = pool
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._listener = _listen(host)
        self._port = self._listener.getsockname()[1]
        self.metadata = PairMetadata(agent, host, self._port, self._secret)
        self._lock = threading.Lock()
        self._is_closing = False
        self._guests: dict[threading.Thread, _Guest] = {}
        self._door = threading.Thread(target=self._accept, name="kv pair door", daemon=True)
        self._door.start()

    def close(self) -> None:
        """Idempotent. Returns when no reader is served any more."""
        with self._lock:
            self._is_closing = True
            guests = dict(self._guests)
        _close_listener(self._listener)
        until_s = time.monotonic() + CLOSE_LIMIT_S
        for guest in guests.values():
            guest.send_away_once_in(max(0.0, until_s - time.monotonic()))
        until_s = time.monotonic() + CLOSE_LIMIT_S
        for thread in (self._door, *guests):
            thread.join(max(0.0, until_s - time.monotonic()))
            if thread.is_alive():
                logger.warning("%s does not end; it keeps the KV pool's memory", thread.name)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                channel = Channel(connection)
            except OSError:
                if self._is_closing:
                    return
                time.sleep(0.1)  # a reader that gave up meanwhile, or no more files: the next one may do
            else:
                self._let_in(channel)

    def _let_in(self, channel: Channel) -> None:
        guest = _Guest(channel, self._fabric, self._pool, self._secret)
        thread = threading.Thread(target=self._serve, args=[guest], name="kv pair owner", daemon=True)
        with self._lock:
            if self._is_closing or len(self._guests) >= MAX_READERS:
                guest.close()
                return
            self._guests[thread] = guest
            thread.start()

    def _serve(self, guest: _Guest) -> None:
        try:
            guest.serve()
        except TransferFailed as error:
            if not self._is_closing:
                logger.log(guest.log_level, "a reader of KV left: %s", error.message)
        finally:
            guest.close()
            with self._lock:
                self._guests.pop(threading.current_thread(), None)


class _Guest:
    """One reader, on a thread of its own."""

    def __init__(self, channel: Channel, fabric: Fabric, pool: PoolDescription, secret: bytes) -> None:
        self._channel = channel
        self._fabric = fabric
        self._pool = pool
        self._secret = secret
        self._pair: Pair | None = None
        self._is_in = threading.Event()
        """Or turned away: there is nothing half done that the other side would wait for."""
        self._is_sent_away = False
        self.log_level = logging.WARNING

    def serve(self) -> None:
        """Until the reader has gone. Raises `TransferFailed`, always."""
        try:
            shape = shape_from_bytes(greet_reader(self._channel, self._secret), self._pool)
            self._pair = self._fabric.pair(self._channel, OWNER)
        finally:
            self._is_in.set()
        lane = Lane(self._pair, self._fabric.pool)
        while not self._is_sent_away:
            self.log_level = logging.DEBUG  # from here on they may leave between two reads
            blocks = blocks_from_bytes(self._channel.recv(None), self._pool)
            self.log_level = logging.WARNING
            if blocks is not None:
                lane.send(messages(shape, blocks, self._fabric.cut))
        raise TransferFailed("the owner ends")

    def send_away_once_in(self, limit_s: float) -> None:
        self._is_in.wait(limit_s)
        self.send_away()

    def send_away(self) -> None:
        """Idempotent, from any thread."""
        self._is_sent_away = True
        self._channel.hang_up()
        if self._pair is not None:
            self._pair.abort()

    def close(self) -> None:
        """On the thread that served it, or would have."""
        self.send_away()
        self._channel.close()


def _listen(host: str) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        with contextlib.ExitStack() as undo:
            undo.callback(listener.close)
            listener.bind(address)
            listener.listen(128)
            undo.pop_all()
    except OSError as error:
        raise StartupError(
            f"the KV transport cannot listen on {host}: {error}; give an address of this machine as the "
            "pool's host"
        ) from error
    return listener


def _close_listener(listener: socket.socket) -> None:
    """Wakes the thread in `accept`, which `close` alone does not."""
    with contextlib.suppress(OSError):  # it is closed already
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
