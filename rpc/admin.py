"""What does a worker tell about itself, and what do operators tell it?"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, generate_latest

from protocol.codec import record_to_wire
from protocol.errors import InvalidRequest, SplitserveError
from protocol.membership import WorkerRecord
from protocol.wire import splitserve_pb2 as pb
from protocol.wire.splitserve_pb2_grpc import WorkerAdminServicer
from rpc.failures import abort

InvalidateCacheCall = Callable[[tuple[int, ...] | None, str | None], Awaitable[None]]
"""(token ids of the prefix or None for everything, cache salt): returns when nobody can get it from here
any more. Raises the fault of an engine that does not listen any more."""

DrainCall = Callable[[float], None]
"""Begins to drain, with the seconds after which what still runs is handed back. Returns at once."""


class AdminService(WorkerAdminServicer):
    """The `WorkerAdmin` service of either role."""

    def __init__(
        self,
        record: Callable[[], WorkerRecord],
        registry: CollectorRegistry,
        invalidate_cache: InvalidateCacheCall,
        drain: DrainCall,
    ) -> None:
        self._record = record
        self._registry = registry
        self._invalidate_cache = invalidate_cache
        self._drain = drain

    async def Describe(
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.WorkerRecord:
        return record_to_wire(self._record())

    async def Metrics(
        self, request: pb.MetricsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.MetricsReply:
        """In Prometheus' text format."""
        return pb.MetricsReply(exposition=generate_latest(self._registry).decode())

    async def InvalidateCache(
        self, request: pb.InvalidateCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.InvalidateCacheReply:
        """After the reply no request hits what is stale, and no ticket for it is valid."""
        try:
            if request.everything:
                await self._invalidate_cache(None, None)
            else:
                await self._invalidate_cache(tuple(request.token_ids), request.cache_salt)
        except SplitserveError as error:
            await abort(context, error)
        return pb.InvalidateCacheReply()

    async def Drain(
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DrainReply:
        """Asked again, it changes nothing: the first limit holds."""
        if not 0 <= request.limit_s < math.inf:
            await abort(context, InvalidRequest(f"limit_s is {request.limit_s}: say how many seconds"))
        self._drain(request.limit_s)
        return pb.DrainReply()
