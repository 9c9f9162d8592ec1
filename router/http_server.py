"""An HTTP server in the running event loop: uvicorn, on a socket that several routers may share.

serve ──drain──> accepts nothing; answers say `connection: close` ──no connection left, or stop──> ended
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http_limits import ClientLimits, LimitedProtocol
from router.listener import Offer

if TYPE_CHECKING:
    from fastapi import FastAPI

DRAIN_S = 3
"""Requests that are still running so long after the end was asked for are made to fail."""
LAST_WORDS_S = 1
"""How long they may take to tell their clients. Serve gives a replica five seconds for all of its end."""
POLL_S = 0.05
BACKLOG = 2048


class HttpServer:
    """Serves one app from construction on, until `stop`."""

    def __init__(
        self,
        app: FastAPI,
        listener: socket.socket,
        drain_s: int = DRAIN_S,
        limits: ClientLimits | None = None,
    ) -> None:
        self._app = _Farewells(app)
        protocol = partial(LimitedProtocol, limits=limits or ClientLimits())
        config = uvicorn.Config(
            self._app,
            http=protocol,  # type: ignore[arg-type]  # it is only called
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=drain_s + LAST_WORDS_S,
        )
        listener.listen(BACKLOG)  # uvicorn does so, too, but a moment later
        self._drain_s = drain_s
        self._server = _SignalFreeServer(config)
        self._task = asyncio.create_task(self._server.serve([listener]))
        self._offer = Offer(listener)

    def check_health(self) -> None:
        """Raise `RuntimeError` when the server has ended."""
        if self._task.done():
            raise RuntimeError("the HTTP server ended")

    async def drain(self, limit_s: float) -> None:
        """Leave new connections to whoever shares the socket, and let those that are here end.

        Each may ask once more, and is told then to come back on another connection: a client that just
        sends on an idle one would fail if it were closed. Idle ones end by uvicorn's keep-alive limit, 5 s.
        """
        await self._accept_no_more()
        self._app.say_farewell = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._server.server_state.connections:  # noqa: ASYNC110  # uvicorn's own way
                    await asyncio.sleep(POLL_S)

    async def stop(self, end_requests: Callable[[], Awaitable[None]]) -> None:
        """Accept nothing new, close idle connections, and give what runs a little time to end.

        Then `end_requests`, called in any case, makes the rest fail: streams end with an error event.
        """
        await self._accept_no_more()
        self._server.should_exit = True
        await asyncio.wait([self._task], timeout=self._drain_s)
        await end_requests()
        await asyncio.wait_for(self._task, timeout=2 * (self._drain_s + LAST_WORDS_S))

    async def _accept_no_more(self) -> None:
        self._offer.withdraw()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                while not (self._server.started or self._task.done()):  # noqa: ASYNC110  # it tells nobody
                    await asyncio.sleep(POLL_S)
        for server in getattr(self._server, "servers", ()):
            server.close()


class _SignalFreeServer(uvicorn.Server):
    """A uvicorn that leaves the process's signals to whoever owns the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Farewells:
    """Lets every answer say, from some time on, that it is the last one on its connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.say_farewell = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_farewell(message: Message) -> None:
            if self.say_farewell and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, receive, send_farewell)
