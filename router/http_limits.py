"""How long may a client take to send a request's head, and to read what it asked for?

uvicorn sets no limit to either: a client that sends a byte now and then, or reads nothing, would hold its
connection, a place in flight and what the workers do for it for ever. Bodies have a limit in `router.http`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
_ANSWER = b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What a client may take."""

    head_timeout_s: float = 10.0
    """From the connection, or the first byte of a further request, until its last header is there."""
    read_timeout_s: float = 30.0
    """How long a client may leave a full buffer (64 KiB beside the kernel's) as it is."""


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol for one connection, with limits."""

    def __init__(self, *args: Any, limits: ClientLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._num_head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop."""
        super().connection_made(transport)
        self._bound_unread_data(transport)
        self._start_head_timer()

    def _bound_unread_data(self, transport: asyncio.Transport) -> None:
        """Also for the end of an answer, which nobody here waits for: the kernel drops the client."""
        connection = transport.get_extra_info("socket")
        if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            limit_ms = int(self._limits.read_timeout_s * 1000)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._stop_head_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        super().data_received(data)
        if self._is_answering:
            self._stop_head_timer()
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")
        elif self._head_timer is None:
            self._start_head_timer()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_head_timer(self) -> None:
        if not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self._head_is_late)

    def _stop_head_timer(self) -> None:
        self._num_head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._refuse(b"408 Request Timeout" if self._num_head_bytes else None)

    def _refuse(self, status: bytes | None) -> None:
        self._stop_head_timer()
        if not self._is_answering and not self.transport.is_closing():
            if status is not None:
                self.transport.write(_ANSWER % status)
            self.transport.close()

    def pause_writing(self) -> None:
        """Called by the transport when its buffer is full."""
        super().pause_writing()
        if self._read_timer is None:
            self._read_timer = self.loop.call_later(self._limits.read_timeout_s, self._reads_nothing)

    def resume_writing(self) -> None:
        """Called by the transport when most of its buffer is read."""
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
        super().resume_writing()

    def _reads_nothing(self) -> None:
        self._read_timer = None
        logger.info("a client read nothing for %g s and is cut off", self._limits.read_timeout_s)
        self.transport.abort()
