"""How does an error of the tree cross a gRPC call, in both directions?

The error travels as a serialised `Failure` in the trailing metadata; the status code is for people
and for peers that are not ours. Where the metadata is missing (the connection broke, the peer is
foreign) the status code decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc import StatusCode

from protocol.codec import failure_from_wire, failure_to_wire
from protocol.errors import (
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    LayoutMismatch,
    NotFound,
    Overloaded,
    RequestCancelled,
    SplitserveError,
    TransferError,
    Unauthorized,
    WorkerUnavailable,
)
from protocol.ids import RequestId
from protocol.wire import splitserve_pb2 as pb

FAILURE_KEY = "splitserve-failure-bin"

_CODE_OF_ERROR: dict[type[SplitserveError], StatusCode] = {
    InvalidRequest: StatusCode.INVALID_ARGUMENT,
    NotFound: StatusCode.NOT_FOUND,
    Unauthorized: StatusCode.UNAUTHENTICATED,
    Overloaded: StatusCode.RESOURCE_EXHAUSTED,
    RequestCancelled: StatusCode.CANCELLED,
    DeadlineExceeded: StatusCode.DEADLINE_EXCEEDED,
    WorkerUnavailable: StatusCode.UNAVAILABLE,
    TransferError: StatusCode.ABORTED,
    LayoutMismatch: StatusCode.FAILED_PRECONDITION,
    SplitserveError: StatusCode.INTERNAL,
}

_ERROR_OF_CODE: dict[StatusCode, type[SplitserveError]] = {
    StatusCode.INVALID_ARGUMENT: InvalidRequest,
    StatusCode.NOT_FOUND: NotFound,
    StatusCode.UNAUTHENTICATED: Unauthorized,
    StatusCode.PERMISSION_DENIED: Unauthorized,
    StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    StatusCode.UNAVAILABLE: WorkerUnavailable,
    # Without our metadata these say that the connection, not the request, came to its end. INTERNAL is what
    # gRPC itself says when a peer is killed just as it is written to.
    StatusCode.CANCELLED: WorkerUnavailable,
    StatusCode.DEADLINE_EXCEEDED: WorkerUnavailable,
    StatusCode.INTERNAL: WorkerUnavailable,
    StatusCode.ABORTED: WorkerUnavailable,
    StatusCode.FAILED_PRECONDITION: LayoutMismatch,
    StatusCode.UNIMPLEMENTED: LayoutMismatch,
}
"""All other codes mean that the peer is broken: `EngineFault`."""


def code_of(error: SplitserveError) -> StatusCode:
    """The status code of the nearest class of the error that has one."""
    return next(_CODE_OF_ERROR[kind] for kind in type(error).__mro__ if kind in _CODE_OF_ERROR)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: SplitserveError) -> NoReturn:
    """End the RPC of `context` with `error`. Never returns: gRPC raises to unwind the handler."""
    failure = failure_to_wire(RequestId(""), error).SerializeToString()
    await context.abort(code_of(error), error.message, ((FAILURE_KEY, failure),))
    raise AssertionError("gRPC's abort returned")


def error_from_rpc(error: Any, peer: str) -> SplitserveError:
    """The error as the peer raised it, or what the status code says about `peer`.

    `error` is what a call raised: an `AioRpcError`, or the `RpcError` of a call without an event loop.
    """
    metadata = error.trailing_metadata()
    for key, value in metadata or ():
        if key == FAILURE_KEY:
            return _decode(value if isinstance(value, bytes) else value.encode(), peer)
    kind = _ERROR_OF_CODE.get(error.code(), EngineFault)
    return kind(f"{peer}: {error.code().name.lower().replace('_', ' ')}: {error.details()}")


def _decode(failure: bytes, peer: str) -> SplitserveError:
    try:
        return failure_from_wire(pb.Failure.FromString(failure))
    except DecodeError:
        return EngineFault(f"{peer} sent an error that cannot be read; do both run the same version?")


@contextmanager
def rpc_errors(peer: str) -> Iterator[None]:
    """Raise gRPC's errors inside the block as errors of the tree."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error, peer) from error
