"""A fake cluster in this process: a directory and workers that follow a script, for tests of a router.

The workers speak the real messages, so that everything of the router but gRPC itself is real.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from protocol.errors import SplitserveError, WorkerUnavailable
from protocol.handoff import Fingerprint
from protocol.ids import Role, WorkerId, WorkerIdentity
from protocol.membership import WorkerRecord
from protocol.wire import splitserve_pb2 as pb
from router.scripted_worker import Script, ScriptedWorker


class ScriptedConnection:
    """A `Connection` to a scripted worker."""

    def __init__(
        self,
        worker: ScriptedWorker,
        on_frame: Callable[[Any], None],
        on_broken: Callable[[SplitserveError], None],
    ) -> None:
        self._on_frame = on_frame
        self._worker = worker
        self._on_broken = on_broken
        self.num_submissions = 0
        self.is_closed = False

    async def start(self) -> None:
        await asyncio.sleep(0)
        if not self._worker.is_alive:
            raise WorkerUnavailable(f"{self._worker.identity} does not answer")
        self._worker.attach(self)

    def send(self, command: Any) -> None:
        self.num_submissions += command.HasField("submit")
        self._worker.receive(command)

    def on_frame(self, frame: Any) -> None:
        """Deliver a frame. One that is refused ends the stream."""
        if isinstance(frame, pb.DecodeFrame) and frame.HasField("credit"):
            frame.credit.num_submissions = self.num_submissions
        try:
            self._on_frame(frame)
        except SplitserveError as error:
            self._worker.detach(self)
            self._on_broken(error)

    def broken(self) -> None:
        self._on_broken(WorkerUnavailable(f"{self._worker.identity}: the stream broke"))

    async def metrics(self, timeout_s: float) -> str:
        if not self._worker.exposition:
            await asyncio.sleep(2 * timeout_s)
        return self._worker.exposition

    async def invalidate_cache(self, request: pb.InvalidateCacheRequest, timeout_s: float) -> None:
        if not self._worker.is_alive:
            raise WorkerUnavailable(f"{self._worker.identity} does not answer")
        if self._worker.is_deaf:
            await asyncio.sleep(2 * timeout_s)
        self._worker.invalidated.append(request)

    async def close(self) -> None:
        self.is_closed = True
        self._worker.detach(self)


class ScriptedCluster:
    """A `Directory` and a `Connect` in one. A worker is listed from `add_worker` until `forget`."""

    def __init__(self, script: Script, eos_id: int = 0) -> None:
        self._script = script
        self._eos_id = eos_id
        self._num_workers = 0
        self.workers_by_identity: dict[WorkerIdentity, ScriptedWorker] = {}
        self.listed: dict[WorkerIdentity, WorkerRecord] = {}
        self.connections: list[ScriptedConnection] = []
        self.error: SplitserveError | None = None
        """Raised instead of the list of workers."""

    def add_worker(self, role: Role) -> ScriptedWorker:
        self._num_workers += 1
        identity = WorkerIdentity(WorkerId(f"{role.value}-{self._num_workers}"), f"i{self._num_workers}")
        record = WorkerRecord(identity, role, f"scripted:{self._num_workers}", _FINGERPRINT, 1 << 20)
        worker = ScriptedWorker(record, self._script, self._eos_id, self.workers_by_identity.get)
        self.workers_by_identity[identity] = worker
        self.listed[identity] = record
        return worker

    def forget(self, worker: ScriptedWorker) -> None:
        self.listed.pop(worker.identity, None)

    def __call__(
        self,
        record: WorkerRecord,
        on_frame: Callable[[Any], None],
        on_broken: Callable[[SplitserveError], None],
    ) -> ScriptedConnection:
        connection = ScriptedConnection(self.workers_by_identity[record.identity], on_frame, on_broken)
        self.connections.append(connection)
        return connection

    async def announce(self, record: WorkerRecord) -> None:
        self.listed[record.identity] = record

    async def withdraw(self, identity: WorkerIdentity) -> None:
        self.listed.pop(identity, None)

    async def workers(self) -> tuple[WorkerRecord, ...]:
        if self.error is not None:
            raise self.error
        return tuple(self.listed.values())

    def assert_idle(self) -> None:
        """No living worker has a request, and every ticket given out was taken over or released."""
        for worker in self.workers_by_identity.values():
            if worker.is_alive:
                assert not worker.running, f"{worker.identity} still runs {worker.running}"  # noqa: S101
                assert not worker.held, f"{worker.identity} still holds {worker.held}"  # noqa: S101


_FINGERPRINT = Fingerprint("scripted", "r1", "float32", "float32", 1, 1, 8, 16)
