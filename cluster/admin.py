"""What an operator tells one worker, over its own gRPC server."""

from __future__ import annotations

from typing import Any

from protocol.codec import record_from_wire
from protocol.membership import WorkerRecord
from protocol.wire import splitserve_pb2 as pb
from protocol.wire.splitserve_pb2_grpc import WorkerAdminStub
from rpc import open_channel, rpc_errors

ADMIN_TIMEOUT_S = 5.0


async def drain_worker(address: str, token: str, limit_s: float) -> None:
    """Tell the worker to take no new work, and to end what runs within `limit_s`. Returns at once.

    Raises `SplitserveError` when it cannot be told.
    """
    await _call(address, token, "Drain", pb.DrainRequest(limit_s=limit_s))


async def describe_worker(address: str, token: str) -> WorkerRecord:
    """What the worker says about itself now. Raises `SplitserveError` when it says nothing."""
    return record_from_wire(await _call(address, token, "Describe", pb.DescribeRequest()))


async def _call(address: str, token: str, method: str, request: Any) -> Any:
    async with open_channel(address, token) as channel:
        with rpc_errors(f"the worker at {address}"):
            return await getattr(WorkerAdminStub(channel), method)(request, timeout=ADMIN_TIMEOUT_S)
