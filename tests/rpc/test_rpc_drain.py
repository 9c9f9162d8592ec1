"""An operator drains a worker: it says so at once, waits for its role, and then asks to be replaced."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from worker_fakes import CLUSTER_TOKEN, D0, FINGERPRINT, MemoryDirectory, ScriptedEngine

from engine import Command, Event, InvalidateCache
from protocol.codec import record_from_wire
from protocol.errors import EngineFault, InvalidRequest, WorkerUnavailable
from protocol.ids import Role
from protocol.wire import splitserve_pb2 as pb
from protocol.wire.splitserve_pb2_grpc import WorkerAdminStub
from rpc import WorkerProfile, WorkerShell, open_channel, rpc_errors, wait_until


class Worker:
    """A shell whose role ends its work when the test says so."""

    def __init__(self) -> None:
        self.directory = MemoryDirectory()
        self.limits_s: list[float] = []
        self.is_empty = asyncio.get_running_loop().create_future()
        self.shell: WorkerShell[Command, Event] = WorkerShell(
            WorkerProfile(D0, FINGERPRINT, 100, CLUSTER_TOKEN),
            Role.DECODE,
            ScriptedEngine,
            self.directory,
            InvalidateCache,
            drain_role=self._drain,
        )

    async def _drain(self, limit_s: float) -> bool:
        self.limits_s.append(limit_s)
        await self.shell.drain()
        is_empty: bool = await self.is_empty
        return is_empty

    async def call(self, method: str, request: Any) -> Any:
        async with open_channel(self.shell.address, CLUSTER_TOKEN) as channel:
            with rpc_errors("the worker"):
                return await getattr(WorkerAdminStub(channel), method)(request, timeout=10)


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker()
    await worker.shell.start([], "127.0.0.1", 0)
    yield worker
    await worker.shell.stop()


async def test_drain_is_answered_at_once_and_is_known_everywhere(worker: Worker) -> None:
    assert worker.shell.refusal() is None
    await worker.call("Drain", pb.DrainRequest(limit_s=30))
    assert isinstance(worker.shell.refusal(), WorkerUnavailable)
    assert record_from_wire(await worker.call("Describe", pb.DescribeRequest())).draining
    assert await wait_until(lambda: worker.directory.records[D0].draining, 10)
    worker.shell.check_health()  # it still works


@pytest.mark.parametrize(
    ("is_empty", "because"),
    [(True, "drained; to be replaced"), (False, r"after 30 s was handed back\); to be replaced")],
)
async def test_a_drained_worker_asks_to_be_replaced(worker: Worker, is_empty: bool, because: str) -> None:
    await worker.call("Drain", pb.DrainRequest(limit_s=30))
    worker.is_empty.set_result(is_empty)
    assert await wait_until(lambda: worker.shell.health.fault is not None, 10)
    with pytest.raises(EngineFault, match=because):
        worker.shell.check_health()
    assert str(worker.shell.unfit()) == "d0 is drained and will be replaced"


async def test_a_second_drain_changes_nothing(worker: Worker) -> None:
    await worker.call("Drain", pb.DrainRequest(limit_s=30))
    await worker.call("Drain", pb.DrainRequest(limit_s=1))
    worker.is_empty.set_result(True)
    assert await wait_until(lambda: worker.shell.health.fault is not None, 10)
    assert worker.limits_s == [30]


@pytest.mark.parametrize("limit_s", [-1, math.inf, math.nan])
async def test_a_limit_that_is_no_time_is_refused(worker: Worker, limit_s: float) -> None:
    with pytest.raises(InvalidRequest, match="limit_s"):
        await worker.call("Drain", pb.DrainRequest(limit_s=limit_s))
    assert worker.shell.refusal() is None


async def test_a_worker_can_be_stopped_while_it_drains(worker: Worker) -> None:
    await worker.call("Drain", pb.DrainRequest(limit_s=30))
    await worker.shell.stop()
    assert worker.shell.health.fault is None
    assert worker.directory.records == {}
