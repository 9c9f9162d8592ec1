"""Every error has a status code, and every status code is an error of the tree."""

from __future__ import annotations

import grpc
import pytest

from protocol.errors import (
    EngineFault,
    LeaseExpired,
    SplitserveError,
    TransferError,
    WorkerUnavailable,
    error_classes,
)
from rpc import error_from_rpc, rpc_errors
from rpc.failures import FAILURE_KEY, code_of


def rpc_error(code: grpc.StatusCode, *metadata: tuple[str, bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), "details", None)


@pytest.mark.parametrize("kind", error_classes().values(), ids=lambda kind: kind.__name__)
def test_every_error_has_a_code(kind: type[SplitserveError]) -> None:
    assert code_of(kind("x")) is not grpc.StatusCode.OK


@pytest.mark.parametrize("code", [c for c in grpc.StatusCode if c is not grpc.StatusCode.OK])
def test_every_code_is_an_error_that_names_the_peer(code: grpc.StatusCode) -> None:
    error = error_from_rpc(rpc_error(code), "w7")
    assert isinstance(error, SplitserveError)
    assert "w7" in error.message


def test_lost_connections_are_retryable() -> None:
    """INTERNAL included: gRPC says it of a peer that was killed just as it was written to."""
    for name in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL"):
        error = error_from_rpc(rpc_error(grpc.StatusCode[name]), "w")
        assert isinstance(error, WorkerUnavailable)


def test_subclass_takes_the_code_of_its_base() -> None:
    assert code_of(LeaseExpired("x")) is code_of(TransferError("x"))


def test_unreadable_failure_is_a_fault_of_the_peer() -> None:
    error = error_from_rpc(rpc_error(grpc.StatusCode.ABORTED, (FAILURE_KEY, b"\xff\xff")), "w")
    assert isinstance(error, EngineFault)


def test_rpc_errors_translates_and_leaves_others_alone() -> None:
    with pytest.raises(WorkerUnavailable), rpc_errors("w"):
        raise rpc_error(grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(KeyError), rpc_errors("w"):
        raise KeyError
