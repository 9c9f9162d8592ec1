"""A prefill worker's session and holder around an engine of the test's choice, without gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from virtual_time import settle
from worker_fakes import BLOCK_SIZE, P0, ScriptedEngine, make_request

from engine import (
    AddSequence,
    BlocksAllocated,
    Command,
    EngineCore,
    EngineStats,
    Event,
    PrefillProgressed,
    ReleaseSequence,
    SchedulerConfig,
    TokensSampled,
)
from engine.fake_executor import FakeExecutor
from prefill_worker.checksums import Checksum
from prefill_worker.holder import Holder
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.session import PrefillSession
from protocol.codec import failure_from_wire, request_to_wire, ticket_from_wire
from protocol.errors import SplitserveError
from protocol.generation import FinishReason, GenerationRequest, Token
from protocol.handoff import LeaseStatus, Released, Ticket, Verdict
from protocol.ids import BlockId, SequenceId
from protocol.ports import Clock
from protocol.wire import splitserve_pb2 as pb
from rpc import EngineLink, Health

LEASE_S = 9.0
OWNER = P0.incarnation
OnEvents = Callable[[Sequence[Event]], None]


class SteppedEngine:
    """A real engine on a fake device, in chunks of one block, that steps when the test says so."""

    def __init__(self, on_events: OnEvents, num_blocks: int = 32) -> None:
        self._on_events = on_events
        config = SchedulerConfig(
            num_blocks=num_blocks,
            max_model_len=100,
            block_size=BLOCK_SIZE,
            max_num_seqs=BLOCK_SIZE,
            max_num_batched_tokens=BLOCK_SIZE,
        )
        clock = asyncio.get_running_loop().time
        self.core = EngineCore(config, FakeExecutor(BLOCK_SIZE), frozenset(), clock)
        self.alive = True
        self.fault: SplitserveError | None = None

    @property
    def stats(self) -> EngineStats:
        return self.core.stats()

    @property
    def progress(self) -> int:
        return self.stats.num_steps

    def start(self) -> None:
        self.alive = True

    def stop(self, timeout_s: float) -> None:
        self.alive = False

    def post(self, command: Command) -> None:
        self._on_events(self.core.handle(command))

    async def step(self, num_steps: int = 1) -> None:
        """Compute one block of the prompts per step, and let the news arrive."""
        for _ in range(num_steps):
            self._on_events(self.core.step(announce=self._on_events))
        await settle()


EngineT = TypeVar("EngineT", ScriptedEngine, SteppedEngine)


class PrefillBench(Generic[EngineT]):
    """Sessions and the holder of one worker. To be built on a running loop."""

    engine: EngineT

    def __init__(
        self,
        make_engine: Callable[[OnEvents], EngineT],
        *,
        checksum: Checksum | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or asyncio.get_running_loop().time
        self.health = Health()
        self._make: Callable[[OnEvents], EngineT] = make_engine
        self.link: EngineLink[Command, Event] = EngineLink(self._make_engine, self.health)
        self.link.start()
        self.registry = CollectorRegistry()
        self.metrics = PrefillMetrics(self.registry, lambda: len(self.holder))
        self.holder = Holder(
            identity=P0,
            address=lambda: "10.0.0.1:5",
            block_size=BLOCK_SIZE,
            lease_s=LEASE_S,
            release_sequence=lambda seq_id: self.link.post(ReleaseSequence(seq_id)),
            metrics=self.metrics,
            clock=self.clock,
            checksum=checksum,
        )
        self.expiry = asyncio.create_task(self.holder.expire_forever())
        self.refusal: SplitserveError | None = None
        self.sessions: list[PrefillSession] = []
        self.session = self.open_session()

    def _make_engine(self, on_events: OnEvents) -> EngineT:
        self.engine = self._make(on_events)
        return self.engine

    def open_session(self) -> PrefillSession:
        """Another router's."""
        session = PrefillSession(self.link, self.holder, lambda: self.refusal, self.metrics, self.clock)
        self.sessions.append(session)
        return session

    def submit(self, request: GenerationRequest | None = None) -> None:
        self.session.on_command(pb.PrefillCommand(submit=request_to_wire(request or make_request())))

    def abort(self, name: str = "r") -> None:
        self.session.on_command(pb.PrefillCommand(abort_request_id=name))

    def give_up(self, ticket: Ticket) -> None:
        self.session.on_command(pb.PrefillCommand(release_ticket_id=ticket.ticket_id))

    def frame(self) -> pb.PrefillFrame:
        """What waits to be sent since the last call."""
        return self.session.outbox.take()

    def ticket(self) -> Ticket:
        """The only one in the frame."""
        (issued,) = self.frame().tickets
        return ticket_from_wire(issued.ticket)

    def failure(self) -> SplitserveError:
        (wire,) = self.frame().failures
        return failure_from_wire(wire)

    async def renew(self, ticket: Ticket) -> LeaseStatus:
        return await self.holder.renew(OWNER, ticket.ticket_id)

    def wait(self, ticket: Ticket, tokens_known: int, wait_s: float = 3.0) -> asyncio.Task[LeaseStatus]:
        """A reader that waits for progress; cancelled, it is one whose connection broke."""
        return asyncio.create_task(self.holder.renew(OWNER, ticket.ticket_id, tokens_known, wait_s))

    async def release(self, ticket: Ticket, reader: str = "a") -> Verdict:
        return (await self.holder.release(OWNER, ticket.ticket_id, reader)).verdict

    async def release_with_checksums(self, ticket: Ticket, reader: str = "a") -> Released:
        return await self.holder.release(OWNER, ticket.ticket_id, reader, wants_checksums=True)

    def sample(self, name: str) -> float:
        return self.registry.get_sample_value(name) or 0.0

    def assert_idle(self) -> None:
        assert sum(map(len, self.sessions)) == 0
        assert len(self.holder) == 0
        assert self.link.num_listeners == 0
        assert not self.expiry.done()
        if isinstance(self.engine, SteppedEngine):
            self.engine.core.assert_idle()


class ScriptedBench(PrefillBench[ScriptedEngine]):
    """With an engine that says what the test wants."""

    def __init__(self, *, checksum: Checksum | None = None, clock: Clock | None = None) -> None:
        super().__init__(ScriptedEngine, checksum=checksum, clock=clock)

    def added(self) -> SequenceId:
        """The id of the sequence that was added with the only command so far."""
        (command,) = self.engine.take()
        assert isinstance(command, AddSequence)
        assert command.hold
        return command.seq_id

    async def allocate(self, seq_id: SequenceId, num_cached_tokens: int = 4) -> None:
        blocks = tuple(map(BlockId, (7, 8, 9, 10)))
        await self.emit(BlocksAllocated(seq_id, blocks, num_cached_tokens))

    async def emit(self, *events: Event) -> None:
        """One step's events, dealt out."""
        self.engine.emit(*events)
        await settle()

    async def compute(
        self, seq_id: SequenceId, reason: FinishReason | None = None, num_tokens: int = 10
    ) -> None:
        """Let the engine run the prompt up to the first token."""
        await self.allocate(seq_id)
        await self.finish(seq_id, reason, num_tokens)

    async def finish(
        self, seq_id: SequenceId, reason: FinishReason | None = None, num_tokens: int = 10
    ) -> None:
        await self.emit(
            PrefillProgressed(seq_id, num_tokens), TokensSampled(seq_id, (Token(77, -0.5),), reason, 4)
        )

    async def hold(self, request: GenerationRequest | None = None) -> tuple[SequenceId, Ticket]:
        """A request whose prefill is done, and the router knows."""
        self.submit(request)
        seq_id = self.added()
        await self.compute(seq_id)
        return seq_id, self.ticket()
