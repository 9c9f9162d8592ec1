"""An HTTP server in the running event loop: uvicorn, on a socket that several routers may share."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

from protocol.errors import StartupError

if TYPE_CHECKING:
    from fastapi import FastAPI

DRAIN_S = 5.0
"""Streams that are still running so long after the farewell are cut off."""


@dataclass(frozen=True, slots=True)
class Listen:
    """Where a router listens."""

    host: str
    port: int
    """0 takes a free one."""


class HttpServer:
    """Serves one app from construction on, until `stop`."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=int(DRAIN_S),
        )
        self._server = _SignalFreeServer(config)
        self._task = asyncio.create_task(self._server.serve([listener]))

    def check_health(self) -> None:
        """Raise `RuntimeError` when the server has ended."""
        if self._task.done():
            raise RuntimeError("the HTTP server ended")

    async def stop(self) -> None:
        """Accept nothing new and give what runs `DRAIN_S` to end."""
        self._server.should_exit = True
        await asyncio.wait_for(self._task, timeout=2 * DRAIN_S)


class _SignalFreeServer(uvicorn.Server):
    """A uvicorn that leaves the process's signals to whoever owns the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(listen: Listen) -> socket.socket:
    """Several routers of one host share the port: the kernel spreads connections over them.

    Raises `StartupError` when the port is taken.
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
