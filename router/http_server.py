"""An HTTP server in the running event loop: uvicorn, on a socket that several routers may share."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

from protocol.errors import StartupError

if TYPE_CHECKING:
    from fastapi import FastAPI

DRAIN_S = 3
"""Requests that are still running so long after the farewell are made to fail."""
LAST_WORDS_S = 1
"""How long they may take to tell their clients. Serve gives a replica five seconds for all of its end."""


@dataclass(frozen=True, slots=True)
class Listen:
    """Where a router listens."""

    host: str
    port: int
    """0 takes a free one."""


class HttpServer:
    """Serves one app from construction on, until `stop`."""

    def __init__(self, app: FastAPI, listener: socket.socket, drain_s: int = DRAIN_S) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=drain_s + LAST_WORDS_S,
        )
        self._drain_s = drain_s
        self._server = _SignalFreeServer(config)
        self._task = asyncio.create_task(self._server.serve([listener]))

    def check_health(self) -> None:
        """Raise `RuntimeError` when the server has ended."""
        if self._task.done():
            raise RuntimeError("the HTTP server ended")

    async def stop(self, end_requests: Callable[[], Awaitable[None]]) -> None:
        """Accept nothing new and give what runs the time to end.

        Then `end_requests`, called in any case, makes the rest fail: streams end with an error event.
        """
        self._server.should_exit = True
        await asyncio.wait([self._task], timeout=self._drain_s)
        await end_requests()
        await asyncio.wait_for(self._task, timeout=2 * (self._drain_s + LAST_WORDS_S))


class _SignalFreeServer(uvicorn.Server):
    """A uvicorn that leaves the process's signals to whoever owns the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(listen: Listen) -> socket.socket:
    """Several routers of one host share the port: the kernel spreads connections over them.

    Raises `StartupError` when the port is taken, but for one that another program of this user shares,
    too: whoever starts the first router looks before (`cluster.serve_port.with_free_port`).
    """
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
