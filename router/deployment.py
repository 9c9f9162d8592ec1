"""The router as a Ray Serve replica.

Clients reach it in one of two ways. *Direct*: the replica listens on the public port itself, so that a
streamed token costs one write of one process. *Ingress*: through Serve's HTTP proxy, wrapped by
`serve.ingress()`; needed where requests arrive at hosts that run no router.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from router.http_server import HttpServer, Listen, bind

if TYPE_CHECKING:
    from fastapi import FastAPI

    from router.router import Router


class RouterReplica:
    """One replica. `build` makes the router; `listen` is where it listens itself, if it does.

    The further arguments are the handles of the worker pools. They are not used: they tell Serve
    that the pools belong to this application.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, build: Callable[[], Router], listen: Listen | None, *_pools: object
    ) -> None:
        self._router = build()
        self._server: HttpServer | None = None
        if listen is not None:
            listener = bind(listen)
            await self._router.start()
            self._server = HttpServer(self.__serve_build_asgi_app__(), listener)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve when this is the ingress; the app's lifespan then starts the router."""
        from router.app import build_app

        return build_app(self._router)

    def check_health(self) -> None:
        """Called by Serve every period; three failures in a row and the replica is replaced."""
        if self._server is not None:
            self._server.check_health()
            self._router.check_health()

    async def __del__(self) -> None:
        """Serve's farewell before a graceful end."""
        server: HttpServer | None = getattr(self, "_server", None)
        if server is not None:
            await server.stop(self._router.stop)
