"""The router as a Ray Serve replica.

Clients reach it in one of two ways. *Direct*: the replica listens on the public port itself, so that a
streamed token costs one write of one process. *Ingress*: through Serve's HTTP proxy, wrapped by
`serve.ingress()`; needed where requests arrive at hosts that run no router.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

from protocol.errors import StartupError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from router.router import Router

DRAIN_S = 5.0
"""Streams that are still running so long after the farewell are cut off."""


@dataclass(frozen=True, slots=True)
class Listen:
    """Where a direct router listens."""

    host: str
    port: int


class RouterReplica:
    """One replica. `build` makes the router; `listen` is where it listens itself, if it does.

    The further arguments are the handles of the worker pools. They are not used: they tell Serve
    that the pools belong to this application.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, build: Callable[[], Router], listen: Listen | None, *_pools: object
    ) -> None:
        self._router = build()
        self._server: _RunningServer | None = None
        if listen is not None:
            listener = _bind(listen)
            await self._router.start()
            self._server = _serve_http(self.__serve_build_asgi_app__(), listener)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve when this is the ingress; the app's lifespan then starts the router."""
        from router.app import build_app

        return build_app(self._router)

    def check_health(self) -> None:
        """Called by Serve every period; three failures in a row and the replica is replaced."""
        if self._server is not None:
            self._server.check_health()

    async def __del__(self) -> None:
        """Serve's farewell before a graceful end."""
        server: _RunningServer | None = getattr(self, "_server", None)
        if server is not None:
            await server.stop()
            await self._router.stop()


class _HttpServer(uvicorn.Server):
    """A uvicorn that leaves the process's signals to Ray."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _RunningServer:
    """uvicorn running in this event loop."""

    def __init__(self, server: _HttpServer, task: asyncio.Task[None]) -> None:
        self._server = server
        self._task = task

    def check_health(self) -> None:
        if self._task.done():
            raise RuntimeError("the HTTP server ended")

    async def stop(self) -> None:
        """Accept nothing new and give what runs `DRAIN_S` to end."""
        self._server.should_exit = True
        await asyncio.wait_for(self._task, timeout=2 * DRAIN_S)


def _serve_http(app: FastAPI, listener: socket.socket) -> _RunningServer:
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=int(DRAIN_S),
    )
    server = _HttpServer(config)
    task = asyncio.create_task(server.serve([listener]))
    return _RunningServer(server, task)


def _bind(listen: Listen) -> socket.socket:
    """Several routers of one host share the port: the kernel spreads connections over them."""
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
