"""What is a decode worker made of, and how does it start and end?"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial

from decode_worker.config import DecodeWorkerConfig
from decode_worker.credit import CreditBook
from decode_worker.metrics import DecodeMetrics
from decode_worker.owner import GrpcOwner, Owner
from decode_worker.peers import Peers
from decode_worker.reader import TransportThread
from decode_worker.service import DecodeService
from decode_worker.session import DecodeSession
from decode_worker.tools import IntakeTools
from engine import Command, Event, InvalidateCache
from protocol.errors import EngineFault, SplitserveError, WorkerUnavailable
from protocol.ids import Role
from protocol.membership import WorkerRecord
from protocol.ports import Clock, Directory, KvReader
from protocol.signals import StageSignals
from protocol.wire.splitserve_pb2_grpc import add_DecodeWorkerServicer_to_server
from rpc import Dial, Engine, TaskSet, WorkerProfile, WorkerShell, open_channel, wait_until

_log = logging.getLogger(__name__)

MakeEngine = Callable[[Callable[[Sequence[Event]], None]], Engine[Command]]

REFRESH_PERIOD_S = 1.0
DIRECTORY_TIMEOUT_S = 3.0
INTAKES_STOP_TIMEOUT_S = 5.0
TRANSPORT_STOP_TIMEOUT_S = 5.0


class DecodeWorker:
    """One decode worker: takes prompts over from their owners and generates the rest.

    Lives on one event loop. Owns its engine and its reader: `stop` ends both.
    """

    def __init__(
        self,
        *,
        profile: WorkerProfile,
        make_engine: MakeEngine,
        reader: KvReader,
        directory: Directory,
        config: DecodeWorkerConfig,
        dial: Dial = open_channel,
        clock: Clock = time.monotonic,
    ) -> None:
        """`make_engine` builds the engine, which calls its argument with the events of every step.

        `dial` opens the channels to owners.
        """
        self._dial = dial
        self._shell: WorkerShell[Command, Event] = WorkerShell(
            profile,
            Role.DECODE,
            make_engine,
            directory,
            InvalidateCache,
            drain_role=self.drain,
            num_demanded_blocks=lambda: self._tools.credit.num_demanded_blocks,
            clock=clock,
        )
        self._directory = directory
        self._config = config
        self._reader = TransportThread(reader, self._shell.health)
        self._peers = Peers(
            self._make_owner,
            self._reader,
            profile.fingerprint,
            connect_timeout_s=config.connect_timeout_s,
            forget_after_s=config.forget_peer_after_s,
            clock=clock,
        )
        self._intakes = TaskSet(self._shell.health)
        self._tools = IntakeTools(
            engine=self._shell.engine,
            peers=self._peers,
            reader=self._reader,
            tasks=self._intakes,
            health=self._shell.health,
            metrics=DecodeMetrics(self._shell.registry, lambda: self.num_peers),
            credit=CreditBook(
                config.credit_reserve, -(-profile.max_model_len // profile.fingerprint.block_size)
            ),
            config=config,
            block_size=profile.fingerprint.block_size,
            clock=clock,
        )
        self._sessions: set[DecodeSession] = set()
        self._shell.health.on_fault(self._fail_all)

    async def start(self, host: str, port: int) -> str:
        """Serve, and announce to the directory. Returns the address. Raises `StartupError`."""
        service = DecodeService(self._open_session, self._close_session)
        self._reader.start()
        try:
            address = await self._shell.start(
                [partial(add_DecodeWorkerServicer_to_server, service)], host, port
            )
        except BaseException:
            await self._reader.stop(TRANSPORT_STOP_TIMEOUT_S)
            raise
        self._shell.tasks.spawn(self._connect_ahead(), "connecting ahead")
        return address

    async def drain(self, limit_s: float) -> bool:
        """Take no new requests, say so, and let those that run end, for up to `limit_s`.

        What is left then fails with `WorkerUnavailable`, so that its router goes on elsewhere. True when
        that was nothing. Idempotent.
        """
        await self._shell.drain()
        if await wait_until(self._is_idle, limit_s):
            return True
        error = WorkerUnavailable(f"{self._shell.profile.identity.worker_id} is drained, its time is up")
        for session in self._sessions:
            session.fail_all(error)
        return False

    async def stop(self, grace_s: float = 0.0) -> None:
        """Drain for up to `grace_s`, then end everything. Bounded, idempotent.

        Each part is ended whatever becomes of the others; their errors are raised afterwards.
        """
        async with AsyncExitStack() as ends:
            ends.push_async_callback(self._reader.stop, TRANSPORT_STOP_TIMEOUT_S)
            ends.push_async_callback(self._peers.close)
            ends.push_async_callback(self._shell.stop)
            # Pending reads end first: the engine must not free blocks that are being read into.
            ends.push_async_callback(self._end_intakes)
            await self.drain(grace_s)

    async def _end_intakes(self) -> None:
        for session in list(self._sessions):
            session.end()
            session.outbox.finish(WorkerUnavailable("the decode worker shuts down"))
        if not await self._intakes.drain(INTAKES_STOP_TIMEOUT_S):
            _log.error("%d intakes have not ended: their blocks are given up", len(self._intakes))
            await self._intakes.cancel(INTAKES_STOP_TIMEOUT_S)

    def check_health(self) -> None:
        """Raise `EngineFault` when this worker must be replaced."""
        self._shell.check_health()

    def record(self) -> WorkerRecord:
        return self._shell.record()

    def signals(self) -> StageSignals:
        """How hard this worker is pressed."""
        return self._shell.signals()

    @property
    def num_peers(self) -> int:
        """Owners that this worker is connected to."""
        return self._peers.num_connected

    def assert_idle(self) -> None:
        """Raise `EngineFault` unless no request runs, nothing is being taken in and no peer is in use."""
        if not self._is_idle():
            num_requests = sum(map(len, self._sessions))
            raise EngineFault(
                f"{num_requests} requests and {len(self._intakes)} intakes run,"
                f" {self._shell.engine.num_listeners} sequences and {self._peers.num_used} peers are in use"
            )

    def _is_idle(self) -> bool:
        num_requests = sum(map(len, self._sessions))
        num_in_use = self._shell.engine.num_listeners + self._peers.num_used
        return num_requests + len(self._intakes) + num_in_use == 0

    def _make_owner(self, address: str) -> Owner:
        profile = self._shell.profile
        return GrpcOwner(
            address,
            self._dial(address, profile.cluster_token),
            profile.identity,
            profile.fingerprint,
            self._config.owner_timeout_s,
        )

    async def _connect_ahead(self) -> None:
        """Keep the connections to all owners that the directory knows."""
        while True:
            try:
                async with asyncio.timeout(DIRECTORY_TIMEOUT_S):
                    records = await self._directory.workers()
            except (SplitserveError, TimeoutError) as error:
                _log.warning("the directory does not answer: %s", error or "timed out")
            else:
                await self._peers.refresh(records)
            await asyncio.sleep(REFRESH_PERIOD_S)

    def _open_session(self) -> DecodeSession:
        """Raises `WorkerUnavailable` when the worker is unfit."""
        if self._shell.health.fault is not None:
            raise self._shell.unfit()
        session = DecodeSession(self._tools, self._shell.refusal)
        self._sessions.add(session)
        return session

    def _close_session(self, session: DecodeSession) -> None:
        session.end()
        self._sessions.discard(session)

    def _fail_all(self, fault: SplitserveError) -> None:
        """A broken worker answers no more: say so, and let no router stay."""
        for session in self._sessions:
            session.fail_all(fault)
            session.outbox.finish(self._shell.unfit())
