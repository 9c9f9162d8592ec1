"""How does a worker listen?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc

from protocol.errors import StartupError
from rpc.auth import TokenGuard
from rpc.options import KEEPALIVE_S, server_options

Registrar = Callable[[grpc.aio.Server], None]
"""Adds one servicer to a server, e.g. `partial(add_PrefillWorkerServicer_to_server, servicer)`."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A listening server."""

    address: str
    """host:port that it is bound to."""
    port: int
    _server: grpc.aio.Server

    async def stop(self, grace_s: float) -> None:
        """Accept nothing new, let calls in flight end within `grace_s`, then cut them off."""
        await self._server.stop(grace_s)


async def start_server(
    registrars: Iterable[Registrar],
    host: str,
    port: int,
    token: str,
    *,
    keepalive_s: float = KEEPALIVE_S,
) -> RunningServer:
    """Listen on `host`:`port` (0: any free port); every call needs the cluster token.

    Raises `StartupError` when the port cannot be bound.
    """
    server = grpc.aio.server(interceptors=[TokenGuard(token)], options=server_options(keepalive_s))
    for register in registrars:
        register(server)
    try:
        bound_port = server.add_insecure_port(join_address(host, port))
    except RuntimeError as error:
        raise StartupError(
            f"cannot listen on {join_address(host, port)}: choose a free port (0 takes any) and an"
            " address of this machine"
        ) from error
    await server.start()
    return RunningServer(join_address(host, bound_port), bound_port, server)


def join_address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
