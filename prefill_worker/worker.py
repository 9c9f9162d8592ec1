"""What is a prefill worker made of, and how does it start and end?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial

from engine import CacheInvalidated, Command, Event, InvalidateCache, ReleaseSequence
from prefill_worker.checksums import Checksum
from prefill_worker.config import PrefillWorkerConfig
from prefill_worker.holder import Holder
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.service import PrefillService
from prefill_worker.session import PrefillSession
from protocol.errors import EngineFault, SplitserveError, WorkerUnavailable
from protocol.ids import Role
from protocol.membership import WorkerRecord
from protocol.ports import Clock, Directory, KvTransport
from protocol.signals import StageSignals
from protocol.wire.splitserve_pb2_grpc import add_PrefillWorkerServicer_to_server
from rpc import Engine, WorkerProfile, WorkerShell, wait_until

MakeEngine = Callable[[Callable[[Sequence[Event]], None]], Engine[Command]]


class PrefillWorker:
    """One prefill worker: runs prompts, holds their blocks under a lease, hands tickets out.

    Lives on one event loop. Owns its engine and its transport: `stop` ends both.
    """

    def __init__(
        self,
        *,
        profile: WorkerProfile,
        make_engine: MakeEngine,
        transport: KvTransport,
        directory: Directory,
        config: PrefillWorkerConfig,
        checksum: Checksum | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`make_engine` builds the engine, which calls its argument with the events of every step.

        `checksum` tells what blocks of the pool hold; None: readers that want to know are refused.
        """
        self._shell: WorkerShell[Command, Event] = WorkerShell(
            profile,
            Role.PREFILL,
            make_engine,
            directory,
            InvalidateCache,
            drain_role=self.drain,
            on_invalidated=self._void_what_is_stale,
            clock=clock,
        )
        self._transport = transport
        self._clock = clock
        self._sessions: set[PrefillSession] = set()
        self._metrics = PrefillMetrics(self._shell.registry, lambda: len(self._holder))
        self._holder = Holder(
            identity=profile.identity,
            address=lambda: self._shell.address,
            block_size=profile.fingerprint.block_size,
            lease_s=config.lease_s,
            release_sequence=lambda seq_id: self._shell.engine.post(ReleaseSequence(seq_id)),
            metrics=self._metrics,
            clock=clock,
            checksum=checksum,
        )
        self._shell.health.on_fault(self._fail_all)

    async def start(self, host: str, port: int) -> str:
        """Serve, and announce to the directory. Returns the address. Raises `StartupError`."""
        service = PrefillService(
            identity=self._shell.profile.identity,
            fingerprint=self._shell.profile.fingerprint,
            endpoint=lambda: self._transport.endpoint,
            holder=self._holder,
            open_session=self._open_session,
            close_session=self._close_session,
        )
        address = await self._shell.start(
            [partial(add_PrefillWorkerServicer_to_server, service)], host, port
        )
        self._shell.tasks.spawn(self._holder.expire_forever(), "lease expiry")
        return address

    async def drain(self, limit_s: float) -> bool:
        """Take no new work, say so, and wait until nothing is computed or held, for up to `limit_s`.

        What is left then is failed with `WorkerUnavailable`, so that its router goes elsewhere, and held
        tickets are dropped. True when that was nothing. Routers and readers stay connected. Idempotent.
        """
        await self._shell.drain()
        if await wait_until(self._is_idle, limit_s):
            return True
        self._end_requests(
            WorkerUnavailable(f"{self._shell.profile.identity.worker_id} is drained, its time is up")
        )
        return False

    async def stop(self, grace_s: float = 0.0) -> None:
        """`drain` for up to `grace_s`, then end everything. Bounded, idempotent.

        Each part is ended whatever becomes of the others; their errors are raised afterwards.
        """
        async with AsyncExitStack() as ends:
            ends.callback(self._transport.close)
            ends.callback(self._holder.drop_all)
            ends.push_async_callback(self._shell.stop)
            await self.drain(grace_s)
            for session in list(self._sessions):
                session.end()
                session.outbox.finish(WorkerUnavailable("the prefill worker shuts down"))

    def check_health(self) -> None:
        """Raise `EngineFault` when this worker must be replaced."""
        self._shell.check_health()

    def record(self) -> WorkerRecord:
        return self._shell.record()

    def signals(self) -> StageSignals:
        """How hard this worker is pressed."""
        return self._shell.signals()

    def assert_idle(self) -> None:
        """Raise `EngineFault` unless no request runs and nothing is held."""
        if not self._is_idle():
            num_requests = sum(map(len, self._sessions))
            raise EngineFault(
                f"{num_requests} requests run, {len(self._holder)} tickets are held,"
                f" {self._shell.engine.num_listeners} sequences are in use"
            )

    def _is_idle(self) -> bool:
        num_requests = sum(map(len, self._sessions))
        return num_requests + len(self._holder) + self._shell.engine.num_listeners == 0

    def _open_session(self) -> PrefillSession:
        """Raises `WorkerUnavailable` when the worker is unfit."""
        if self._shell.health.fault is not None:
            raise self._shell.unfit()
        session = PrefillSession(
            self._shell.engine, self._holder, self._shell.refusal, self._metrics, self._clock
        )
        self._sessions.add(session)
        return session

    def _close_session(self, session: PrefillSession) -> None:
        session.end()
        self._sessions.discard(session)

    def _void_what_is_stale(self, event: Event) -> None:
        """A reader that has not got its verdict yet must not bring what was forgotten to its cache."""
        if isinstance(event, CacheInvalidated):
            self._holder.drop_sequences(event.stale_held)

    def _fail_all(self, fault: SplitserveError) -> None:
        """A broken engine answers no more: say so, let no router stay, and let readers know that their KV
        is void."""
        self._end_requests(fault)
        for session in self._sessions:
            session.outbox.finish(self._shell.unfit())

    def _end_requests(self, error: SplitserveError) -> None:
        for session in self._sessions:
            session.fail_all(error)
        self._holder.drop_all()
