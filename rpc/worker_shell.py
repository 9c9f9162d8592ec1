"""What is a worker beside its role? An engine, a server, an entry in the directory, and a bounded end.

start: engine ──> server ──> announced            (stopped again when a step fails)
drain: announced as draining; the role lets what runs end, up to a limit; then unfit: to be replaced
stop:  server ──> tasks ──> withdrawn ──> engine
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry

from protocol.errors import SplitserveError, StartupError, WorkerUnavailable
from protocol.handoff import Fingerprint
from protocol.ids import Role, SequenceId, WorkerIdentity
from protocol.membership import WorkerRecord
from protocol.ports import Clock, Directory
from protocol.signals import StageSignals
from protocol.wire.splitserve_pb2_grpc import add_WorkerAdminServicer_to_server
from rpc.admin import AdminService
from rpc.announcer import Announcer
from rpc.engine_link import Engine, EngineLink, HasSequence
from rpc.engine_metrics import EngineCollector
from rpc.health import Health
from rpc.server import Registrar, RunningServer, join_address, start_server
from rpc.stage_meter import StageMeter
from rpc.startup import LAST_PHASE, StartupClock, StartupCollector
from rpc.tasks import TaskSet

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT", bound=HasSequence)

ALL_INTERFACES = ("", "0.0.0.0", "::")  # noqa: S104  # recognised here, never bound by default
SESSIONS_STOP_TIMEOUT_S = 1.0
ENGINE_STOP_TIMEOUT_S = 10.0
TASKS_STOP_TIMEOUT_S = 5.0
HEALTH_CHECK_PERIOD_S = 0.25


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """Who a worker is and what it serves."""

    identity: WorkerIdentity
    fingerprint: Fingerprint
    max_model_len: int
    cluster_token: str = field(repr=False)
    advertise_host: str | None = None
    """Where other machines reach this worker; None: the host that it listens on."""
    ops: str = ""
    """What its engine computes with."""
    startup: StartupClock = field(default_factory=StartupClock, compare=False, repr=False)
    """Measures how long it takes until this worker is ready."""


class WorkerShell(Generic[CommandT, EventT]):
    """The parts that both roles have. Used on one event loop."""

    def __init__(
        self,
        profile: WorkerProfile,
        role: Role,
        make_engine: Callable[[Callable[[Sequence[EventT]], None]], Engine[CommandT]],
        directory: Directory,
        invalidation: Callable[[SequenceId, tuple[int, ...] | None, str | None], CommandT],
        *,
        drain_role: Callable[[float], Awaitable[bool]],
        on_invalidated: Callable[[EventT], None] = lambda event: None,
        num_demanded_blocks: Callable[[], int] = lambda: 0,
        clock: Clock = time.monotonic,
    ) -> None:
        """`invalidation` makes the engine's command to forget a cached prefix, or everything;
        `on_invalidated` gets its answer before anything that happened later. `drain_role` calls `drain`
        first, then lets the role's work end for up to so many seconds; True: all of it has ended.
        `num_demanded_blocks` tells how many KV blocks are waited for."""
        self.profile = profile
        self.health = Health()
        self.tasks = TaskSet(self.health)
        self.engine: EngineLink[CommandT, EventT] = EngineLink(make_engine, self.health)
        self._meter = StageMeter(lambda: self.engine.stats, num_demanded_blocks, clock)
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(lambda: self.engine.stats, self.record, self.signals))
        self.registry.register(StartupCollector(profile.startup))
        self.is_draining = False
        self._role = role
        self._invalidation = invalidation
        self._on_invalidated = on_invalidated
        self._drain_role = drain_role
        self._is_leaving = False
        self._announcer = Announcer(directory, self.record)
        self._address = ""
        self._server: RunningServer | None = None

    @property
    def address(self) -> str:
        """host:port under which others reach this worker; empty before the start."""
        return self._address

    def record(self) -> WorkerRecord:
        """What the directory is told."""
        return WorkerRecord(
            identity=self.profile.identity,
            role=self._role,
            address=self._address,
            fingerprint=self.profile.fingerprint,
            max_model_len=self.profile.max_model_len,
            load=self.engine.load,
            draining=self.is_draining or self.health.fault is not None,
            ops=self.profile.ops,
        )

    def signals(self) -> StageSignals:
        """How hard this worker is pressed."""
        return self._meter.signals()

    async def start(self, registrars: Iterable[Registrar], host: str, port: int) -> str:
        """Serve on `host`:`port` (0: any free one) and be found. Returns the address to reach it.

        Raises `StartupError`; nothing runs then.
        """
        advertised = self.profile.advertise_host or host
        if advertised in ALL_INTERFACES:
            raise StartupError(f"to listen on {host!r}, say which host name others reach this worker by")
        self.engine.start()
        try:
            service = AdminService(self.record, self.registry, self._invalidate_cache, self.drain_and_leave)
            admin = partial(add_WorkerAdminServicer_to_server, service)
            token = self.profile.cluster_token
            self._server = await start_server([*registrars, admin], host, port, token)
        except BaseException:
            await self.engine.stop(ENGINE_STOP_TIMEOUT_S)
            raise
        self._address = join_address(advertised, self._server.port)
        self.tasks.spawn(self.engine.watch(), "engine watch")
        self.tasks.spawn(self._announcer.run(), "announcer")
        self.tasks.spawn(self._meter.run(), "stage meter")
        self.profile.startup.end(LAST_PHASE)
        return self._address

    async def drain(self) -> None:
        """Take no new work and say so; what runs goes on, and so readers and routers stay connected."""
        if self._server is not None:
            self.is_draining = True
            await self._announcer.announce()

    def drain_and_leave(self, limit_s: float) -> None:
        """Drain in the background, then ask to be replaced. Returns at once. Idempotent."""
        if not self._is_leaving:
            self._is_leaving = True
            self.is_draining = True
            self.tasks.spawn(self._drain_and_leave(limit_s), "drain")

    async def _drain_and_leave(self, limit_s: float) -> None:
        is_empty = await self._drain_role(limit_s)
        handed_back = "" if is_empty else f" (what still ran after {limit_s:g} s was handed back)"
        self.health.report(WorkerUnavailable(f"drained{handed_back}; to be replaced"))

    async def stop(self) -> None:
        """End what `start` started; the role has ended its sessions before. Bounded, idempotent.

        Raises what a part raised, such as an `EngineFault` when the engine hangs, once all had their turn.
        """
        server, self._server = self._server, None
        if server is None:
            return
        async with AsyncExitStack() as ends:
            ends.push_async_callback(self.engine.stop, ENGINE_STOP_TIMEOUT_S)
            ends.push_async_callback(self._announcer.withdraw)
            ends.push_async_callback(self.tasks.cancel, TASKS_STOP_TIMEOUT_S)
            await server.stop(SESSIONS_STOP_TIMEOUT_S)

    def refusal(self) -> SplitserveError | None:
        """Why no new request can be taken now; None when it can."""
        if self.health.fault is not None:
            return self.unfit()
        if self.is_draining:
            return WorkerUnavailable(f"{self.profile.identity.worker_id} is shutting down")
        return None

    def unfit(self) -> WorkerUnavailable:
        """What a router is told about a worker that is broken for good, beside the fault of its requests:
        this stream leads nowhere, and there is no point in another one."""
        why = "is drained" if isinstance(self.health.fault, WorkerUnavailable) else "is broken"
        return WorkerUnavailable(f"{self.profile.identity.worker_id} {why} and will be replaced")

    async def _invalidate_cache(self, token_ids: tuple[int, ...] | None, cache_salt: str | None) -> None:
        """Return when it is done. Raises `EngineFault`; whoever waits sets the time limit."""
        self.check_health()  # a broken engine would not hear it
        seq_id = self.engine.new_sequence_id("cache invalidation")
        is_done = asyncio.Event()

        def on_answer(event: EventT) -> None:  # also when nobody waits any more
            self.engine.forget(seq_id)
            self._on_invalidated(event)
            is_done.set()

        self.engine.listen(seq_id, on_answer)
        self.engine.post(self._invalidation(seq_id, token_ids, cache_salt))
        while not await wait_until(is_done.is_set, HEALTH_CHECK_PERIOD_S, period_s=0.005):
            self.check_health()

    def check_health(self) -> None:
        """Raise `EngineFault` when the engine or another part is broken for good."""
        self.engine.check()
        self.health.check()


async def wait_until(is_done: Callable[[], bool], timeout_s: float, period_s: float = 0.02) -> bool:
    """Look every `period_s` until `is_done`, for at most `timeout_s`. Returns the last answer."""
    for _ in range(math.ceil(timeout_s / period_s)):
        if is_done():
            return True
        await asyncio.sleep(period_s)
    return is_done()
