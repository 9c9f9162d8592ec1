"""Who may talk to a worker? Whoever sends the cluster token with every call.

The token travels as `authorization: Bearer <token>`. A server refuses everything else before any
handler runs, with `Unauthorized` (UNAUTHENTICATED).
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NoReturn

import grpc

from protocol.errors import StartupError, Unauthorized
from rpc.failures import abort

AUTHORIZATION = "authorization"


def credentials_of(token: str) -> str:
    """The value of the authorization header. Raises `StartupError` when the token is empty."""
    if not token:
        raise StartupError("the cluster token is empty: give all processes of a cluster the same secret")
    return f"Bearer {token}"


class TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Server side: lets calls with the right token pass, and aborts all others."""

    def __init__(self, token: str) -> None:
        self._expected = credentials_of(token).encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        if handler is None or self._admits(handler_call_details.invocation_metadata):
            return handler
        return _refusal_like(handler)

    def _admits(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
        given = next((value for key, value in metadata or () if key == AUTHORIZATION), "")
        raw = given if isinstance(given, bytes) else given.encode()
        return hmac.compare_digest(raw, self._expected)


async def _refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    await abort(
        context, Unauthorized("wrong or missing cluster token: all processes of a cluster share one")
    )


def _refusal_like(handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the same shape (gRPC insists on it) that refuses every call."""
    shape = (bool(handler.request_streaming), bool(handler.response_streaming))
    make: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return make[shape](
        _refuse,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
