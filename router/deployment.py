"""The router as a Ray Serve replica.

Clients reach it in one of two ways. *Direct*: the replica listens on the public port itself, so that a
streamed token costs one write of one process. *Ingress*: through Serve's HTTP proxy, wrapped by
`serve.ingress()`; needed where requests arrive at hosts that run no router.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from router.http_limits import ClientLimits
from router.http_server import HttpServer
from router.listener import Listen, bind

if TYPE_CHECKING:
    from fastapi import FastAPI

    from router.router import Router

SETTLE_S = 5.0
"""How long a replica waits for workers before it takes requests, which then wait for them."""
POLL_S = 0.05
ASK_SERVE_S = 0.5
SERVE_TIMEOUT_S = 2.0


class RouterReplica:
    """One replica. `build` makes the router; `listen` is where it listens itself, if it does.

    Clients that are there when it is replaced have `drain_limit_s`; when all of the application ends, as
    `is_deleted` tells (it may block), a few seconds.

    The further arguments are the handles of the worker pools. They are not used: they tell Serve
    that the pools belong to this application.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        build: Callable[[], Router],
        listen: Listen | None,
        limits: ClientLimits,
        drain_limit_s: float,
        is_deleted: Callable[[], bool],
        *_pools: object,
    ) -> None:
        self._router = build()
        self._drain_limit_s = drain_limit_s
        self._is_deleted = is_deleted
        self._server: HttpServer | None = None
        listener = await asyncio.to_thread(bind, listen) if listen is not None else None
        await self._router.start()
        await self._settle()
        if listener is not None:
            self._server = HttpServer(self.__serve_build_asgi_app__(), listener, limits=limits)

    async def _settle(self) -> None:
        """Until a hand-off has succeeded: the replica that this one replaces serves on until then."""
        waited_s = 0.0
        while self._router.not_ready_because() is not None and waited_s < SETTLE_S:
            await asyncio.sleep(POLL_S)
            waited_s += POLL_S

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve when this is the ingress; the app's lifespan ends the router then."""
        from router.app import build_app

        return build_app(self._router)

    def check_health(self) -> None:
        """Called by Serve every period; three failures in a row and the replica is replaced."""
        if self._server is not None:
            self._server.check_health()
            self._router.check_health()

    async def __del__(self) -> None:
        """Serve's farewell before a graceful end: an update, or the end of all."""
        server: HttpServer | None = getattr(self, "_server", None)
        if server is not None:
            try:
                await _unless(self._application_ends, server.drain(self._drain_limit_s))
            finally:
                await server.stop(self._router.stop)

    async def _application_ends(self) -> bool:
        try:
            return await asyncio.wait_for(asyncio.to_thread(self._is_deleted), SERVE_TIMEOUT_S)
        except TimeoutError:
            return False


async def _unless(is_over: Callable[[], Awaitable[bool]], work: Awaitable[None]) -> None:
    """Wait for `work`, or cancel it as soon as `is_over` says so."""
    working = asyncio.ensure_future(work)
    try:
        while not working.done():
            if await is_over():
                working.cancel()
            await asyncio.wait([working], timeout=ASK_SERVE_S)
    finally:
        working.cancel()
    if not working.cancelled():
        working.result()
