"""A fake cluster in this process: a directory and workers that follow a script, for tests of a router.

The workers speak the real messages, so that everything of the router but gRPC itself is real.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from protocol import codec
from protocol.errors import SplitserveError, WorkerUnavailable
from protocol.generation import FinishReason, GenerationRequest, Receipt, Token, TokenDelta
from protocol.handoff import Fingerprint, Ticket
from protocol.ids import BlockId, RequestId, Role, TicketId, WorkerId, WorkerIdentity
from protocol.membership import Load, WorkerRecord
from protocol.wire import splitserve_pb2 as pb

Script = Callable[[GenerationRequest], Sequence[int]]
"""The whole output of a request as token ids, whatever part of it is there already."""

EOS = -1
"""In a script: the sequence ends here with `stop`; the worker's `eos_id` is the token."""


class ScriptedWorker:
    """One worker; the other end of a `Connection`. Attributes may be set at any time."""

    def __init__(self, record: WorkerRecord, script: Script, eos_id: int) -> None:
        self.record = record
        self.script = script
        self.eos_id = eos_id
        self.num_until_pause: int | None = None
        """Tokens that this worker still gives out before it falls silent; None: no limit."""
        self._resumed = asyncio.Event()
        self.failures: list[SplitserveError] = []
        """The next submits fail with these."""
        self.receipt = Receipt(fetched_bytes=int(record.role is Role.DECODE))
        self.exposition = ""
        self.is_alive = True
        self.requests: list[GenerationRequest] = []
        self.aborted: list[RequestId] = []
        self.released: list[TicketId] = []
        self.tickets: list[TicketId] = []
        """Tickets given out, or taken over."""
        self._connections: list[ScriptedConnection] = []
        self._running: dict[RequestId, asyncio.Task[None]] = {}

    @property
    def identity(self) -> WorkerIdentity:
        return self.record.identity

    @property
    def running(self) -> list[RequestId]:
        """Requests submitted and neither ended nor aborted."""
        return list(self._running)

    def kill(self) -> None:
        """As kill -9: all streams break, nothing more comes; the directory does not know yet."""
        self.is_alive = False
        for task in self._running.values():
            task.cancel()
        self._running.clear()
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.broken()

    def resume(self) -> None:
        """End a pause for good."""
        self.num_until_pause = None
        self._resumed.set()

    def attach(self, connection: ScriptedConnection) -> None:
        self._connections.append(connection)
        self._reply(self._frame())

    def detach(self, connection: ScriptedConnection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)

    def report(self, load: Load) -> None:
        """Send a frame that carries nothing but a load."""
        frame = self._frame()
        frame.load.CopyFrom(codec.load_to_wire(load))
        self._reply(frame)

    def receive(self, command: Any) -> None:
        if not self.is_alive:
            return
        kind = command.WhichOneof("command")
        if kind == "submit":
            self._submit(command.submit)
        elif kind == "abort_request_id":
            request_id = RequestId(command.abort_request_id)
            self.aborted.append(request_id)
            if (task := self._running.pop(request_id, None)) is not None:
                task.cancel()
        else:
            self.released.append(TicketId(command.release_ticket_id))

    def _submit(self, submit: Any) -> None:
        is_prefill = self.record.role is Role.PREFILL
        request = codec.request_from_wire(submit if is_prefill else submit.request)
        self.requests.append(request)
        if self.failures:
            frame = self._frame()
            frame.failures.append(codec.failure_to_wire(request.request_id, self.failures.pop(0)))
            self._reply(frame)
            return
        if not is_prefill:
            self.tickets.append(TicketId(submit.ticket.ticket_id))
        work = self._prefill(request) if is_prefill else self._decode(request, submit.first_token.token_id)
        self._running[request.request_id] = asyncio.create_task(work)

    async def _prefill(self, request: GenerationRequest) -> None:
        first = await self._next(request, len(request.output_token_ids))
        done = pb.PrefillDone(first=codec.delta_to_wire(first))
        if first.finish_reason is None:
            ticket_id = TicketId(f"ticket-{request.request_id}-{self.identity}")
            self.tickets.append(ticket_id)
            done.ticket.CopyFrom(codec.ticket_to_wire(self._ticket(ticket_id, request)))
        self._running.pop(request.request_id, None)
        self._reply(pb.PrefillFrame(done=[done]))

    def _ticket(self, ticket_id: TicketId, request: GenerationRequest) -> Ticket:
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        return Ticket(
            ticket_id,
            self.identity,
            self.record.address,
            (BlockId(1),),
            num_tokens,
            num_tokens,
            lease_s=10.0,
        )

    async def _decode(self, request: GenerationRequest, first_token: int) -> None:
        at = len(request.output_token_ids)
        expected = self._token(request, at)
        assert first_token == expected, f"token {at} is {first_token}, not {expected}"  # noqa: S101
        finished = False
        while not finished:
            at += 1
            delta = await self._next(request, at)
            finished = delta.finish_reason is not None
            if finished:
                self._running.pop(request.request_id, None)
            self._reply(pb.DecodeFrame(deltas=[codec.delta_to_wire(delta)]))

    async def _next(self, request: GenerationRequest, at: int) -> TokenDelta:
        """Output token number `at`, in the next turn of the loop; never when the worker is paused."""
        await asyncio.sleep(0)
        if self.num_until_pause is not None:
            if self.num_until_pause == 0:
                await self._resumed.wait()
            else:
                self.num_until_pause -= 1
        token_id = self._token(request, at)
        logprob: float | None = None
        best: tuple[tuple[int, float], ...] = ()
        if request.sampling.logprobs is not None:
            logprob, best = -0.5, ((token_id, -0.5),) * min(request.sampling.logprobs, 1)
        reason = None
        if self.script(request)[at] == EOS:
            reason = FinishReason.STOP
        elif at + 1 >= request.sampling.max_tokens:
            reason = FinishReason.LENGTH
        return TokenDelta(request.request_id, (Token(token_id, logprob, best),), reason, self.receipt)

    def _token(self, request: GenerationRequest, at: int) -> int:
        token_id = self.script(request)[at]
        return self.eos_id if token_id == EOS else token_id

    def _frame(self) -> Any:
        return pb.PrefillFrame() if self.record.role is Role.PREFILL else pb.DecodeFrame()

    def _reply(self, frame: Any) -> None:
        for connection in self._connections:
            connection.on_frame(frame)


class ScriptedConnection:
    """A `Connection` to a scripted worker."""

    def __init__(
        self,
        worker: ScriptedWorker,
        on_frame: Callable[[Any], None],
        on_broken: Callable[[SplitserveError], None],
    ) -> None:
        self.on_frame = on_frame
        self._worker = worker
        self._on_broken = on_broken
        self.is_closed = False

    async def start(self) -> None:
        await asyncio.sleep(0)
        if not self._worker.is_alive:
            raise WorkerUnavailable(f"{self._worker.identity} does not answer")
        self._worker.attach(self)

    def send(self, command: Any) -> None:
        self._worker.receive(command)

    def broken(self) -> None:
        self._on_broken(WorkerUnavailable(f"{self._worker.identity}: the stream broke"))

    async def metrics(self, timeout_s: float) -> str:
        if not self._worker.exposition:
            await asyncio.sleep(2 * timeout_s)
        return self._worker.exposition

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
        worker = ScriptedWorker(record, self._script, self._eos_id)
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
        workers = [w for w in self.workers_by_identity.values() if w.is_alive]
        for worker in workers:
            assert not worker.running, f"{worker.identity} still runs {worker.running}"  # noqa: S101
        taken = {
            t for w in self.workers_by_identity.values() if w.record.role is Role.DECODE for t in w.tickets
        }
        for worker in workers:
            if worker.record.role is Role.PREFILL:
                leaked = set(worker.tickets) - taken - set(worker.released)
                assert not leaked, f"{worker.identity} still holds {leaked}"  # noqa: S101


_FINGERPRINT = Fingerprint("scripted", "r1", "float32", "float32", 1, 1, 8, 16)
