"""How does a thread without an event loop call a worker? Over a channel whose calls are futures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from rpc.auth import AUTHORIZATION, credentials_of
from rpc.options import KEEPALIVE_S, channel_options


def open_blocking_channel(address: str, token: str, *, keepalive_s: float = KEEPALIVE_S) -> grpc.Channel:
    """As `open_channel`, for stubs that block, or whose methods' `future` does not."""
    channel = grpc.insecure_channel(address, options=channel_options(keepalive_s))
    return grpc.intercept_channel(channel, _TokenSender(credentials_of(token)))


class _TokenSender(grpc.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Sends the cluster token with every call."""

    def __init__(self, credentials: str) -> None:
        self._metadata = (AUTHORIZATION, credentials)

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        details = _CallDetails(client_call_details, self._metadata)
        return continuation(details, request)


class _CallDetails(grpc.ClientCallDetails):
    """Those of another call, with more metadata."""

    def __init__(self, call: Any, more: tuple[str, str]) -> None:
        self.method = call.method
        self.timeout = call.timeout
        self.metadata = (*(call.metadata or ()), more)
        self.credentials = call.credentials
        self.wait_for_ready = call.wait_for_ready
        self.compression = call.compression
