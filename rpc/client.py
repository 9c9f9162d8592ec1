"""How does a process reach a worker's gRPC server?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import grpc

from rpc.auth import AUTHORIZATION, credentials_of
from rpc.options import KEEPALIVE_S, channel_options


def open_channel(address: str, token: str, *, keepalive_s: float = KEEPALIVE_S) -> grpc.aio.Channel:
    """A channel to `address` (host:port) that sends the cluster token with every call.

    Connects lazily and reconnects by itself. A peer that vanished without a word is found within
    twice `keepalive_s`: every call in flight then fails with UNAVAILABLE. Close it when done.
    """
    credentials = credentials_of(token)
    return TokenChannel(
        grpc.aio.insecure_channel(address, options=channel_options(keepalive_s)), credentials
    )


class TokenChannel(grpc.aio.Channel):
    """Another channel whose calls carry the token.

    An interceptor would do the same, but gRPC then feeds a stream's writes through a task of its own,
    which nobody ends when the peer ends the stream, and which complains when it is collected.
    """

    def __init__(self, channel: grpc.aio.Channel, credentials: str) -> None:
        self._channel = channel
        self._metadata = ((AUTHORIZATION, credentials),)

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return self._authorized(self._channel.unary_unary(*args, **options))

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return self._authorized(self._channel.unary_stream(*args, **options))

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return self._authorized(self._channel.stream_unary(*args, **options))

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return self._authorized(self._channel.stream_stream(*args, **options))

    def _authorized(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: Sequence[tuple[str, str | bytes]] = (), **options: Any) -> Any:
            return method(*args, metadata=(*metadata, *self._metadata), **options)

        return call

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> TokenChannel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
