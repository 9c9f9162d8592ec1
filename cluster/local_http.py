"""The OpenAI API of a cluster whose router is in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from cluster.config import ClusterConfig
from cluster.serve_port import with_free_port

if TYPE_CHECKING:
    from router.router import Router


@asynccontextmanager
async def serve_http(config: ClusterConfig, router: Router) -> AsyncIterator[str]:
    """Serve as configured; gives the base URL. The router is stopped at the end. Raises `StartupError`."""
    from router.app import build_app
    from router.http_limits import ClientLimits
    from router.http_server import HttpServer
    from router.listener import Listen, bind

    # Routers share their port, so that the bind alone would not notice a stranger's router on it.
    http = with_free_port(config).http
    listener = bind(Listen(http.host, http.port))
    host, port = listener.getsockname()[:2]
    limits = ClientLimits(http.head_timeout_s, http.read_timeout_s)
    server = HttpServer(build_app(router), listener, limits=limits)
    try:
        yield f"http://{host}:{port}"
    finally:
        await server.stop(router.stop)
