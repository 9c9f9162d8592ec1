"""What does a worker tell about itself? Its record, and its metrics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, generate_latest

from protocol.codec import record_to_wire
from protocol.membership import WorkerRecord
from protocol.wire import splitserve_pb2 as pb
from protocol.wire.splitserve_pb2_grpc import WorkerAdminServicer


class AdminService(WorkerAdminServicer):
    """The `WorkerAdmin` service of either role."""

    def __init__(self, record: Callable[[], WorkerRecord], registry: CollectorRegistry) -> None:
        self._record = record
        self._registry = registry

    async def Describe(
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.WorkerRecord:
        return record_to_wire(self._record())

    async def Metrics(
        self, request: pb.MetricsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.MetricsReply:
        return pb.MetricsReply(exposition=generate_latest(self._registry).decode())
