"""Fakes around an intake: an owner and a reader that answer when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

from prometheus_client import CollectorRegistry
from virtual_time import settle
from worker_fakes import BLOCK_SIZE, FINGERPRINT, P0, ScriptedEngine, make_request

from decode_worker.config import DecodeWorkerConfig, OnKvFailure
from decode_worker.credit import CreditBook
from decode_worker.metrics import DecodeMetrics
from decode_worker.owner import OwnerHello
from decode_worker.peers import Peers
from decode_worker.reader import Read, ReadEnd
from decode_worker.session import DecodeSession
from decode_worker.tools import IntakeTools
from engine import BlocksAllocated, Command, Event, ReserveSequence, TokensSampled
from protocol.codec import failure_from_wire, request_to_wire, ticket_to_wire, token_to_wire
from protocol.errors import SplitserveError, TransferFailed, WorkerUnavailable
from protocol.generation import FinishReason, GenerationRequest, Token
from protocol.handoff import (
    Fingerprint,
    LeaseStatus,
    PoolDescription,
    Released,
    Ticket,
    TransportEndpoint,
    Verdict,
)
from protocol.ids import BlockId, SequenceId, TicketId, WorkerIdentity
from protocol.ports import FetchStatus
from protocol.wire import splitserve_pb2 as pb
from rpc import EngineLink, Health, TaskSet

LEASE_S = 9.0
NO_CHECKSUMS: Mapping[int, int] = MappingProxyType({})
FIRST_TOKEN = MappingProxyType({0: 77})
BLOCK_BYTES = 1000


class FakeOwner:
    """The owner of one worker's tickets."""

    def __init__(self, identity: WorkerIdentity = P0) -> None:
        self.identity = identity
        self.fingerprint: Fingerprint = FINGERPRINT
        self.agent = f"agent-{identity.incarnation}"
        self.calls: list[str] = []
        """All but the renewals."""
        self.readers: list[str] = []
        """Who released."""
        self.num_renewals = 0
        self.num_waiting = 0
        """Renewals that wait for progress."""
        self.verdict = Verdict.VALID
        self.checksums: tuple[int, ...] = ()
        self.fails_with: SplitserveError | None = None
        self.release_fails_with: SplitserveError | None = None
        self.is_closed = False
        self.answers = asyncio.Event()
        self.answers.set()
        """Cleared: no call returns."""
        self.greets = asyncio.Event()
        self.greets.set()
        """Cleared: `connect` does not return."""
        self.judges = asyncio.Event()
        self.judges.set()
        """Cleared: `release` does not return."""
        self._tokens_ready: int | None = None  # None: all of them
        self._is_held = True
        self._news = asyncio.Event()

    def compute(self, tokens_ready: int) -> None:
        """So many tokens of every ticket are ready."""
        self._tokens_ready = tokens_ready
        self._tell()

    def lose(self) -> None:
        """The leases are lost."""
        self._is_held = False
        self._tell()

    def die(self) -> None:
        """No call is answered any more; those under way break."""
        self.fails_with = WorkerUnavailable("connection refused")
        self._tell()

    def hang(self) -> None:
        """As a stopped process or a cut network: nothing comes back."""
        self.answers.clear()

    async def connect(self) -> OwnerHello:
        await self._called("connect")
        await self.greets.wait()
        endpoint = TransportEndpoint("fake", self.agent, PoolDescription(100, BLOCK_BYTES), b"")
        return OwnerHello(self.identity, self.fingerprint, endpoint)

    async def renew(self, ticket: Ticket, tokens_known: int, wait_s: float) -> LeaseStatus:
        self.num_renewals += 1
        await self._check()
        self.num_waiting += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while self._is_held and self._ready_of(ticket) <= tokens_known:
                        await self._news.wait()
                        await self._check()
        finally:
            self.num_waiting -= 1
        await self._check()
        return LeaseStatus(self._is_held, self._ready_of(ticket), ticket.lease_s)

    async def release(self, ticket: Ticket, reader: str, wants_checksums: bool) -> Released:
        await self._called("release")
        self.readers.append(reader)
        await self.judges.wait()
        if self.release_fails_with is not None:
            raise self.release_fails_with
        return Released(self.verdict, self.checksums if wants_checksums else ())

    async def close(self) -> None:
        self.is_closed = True

    def _ready_of(self, ticket: Ticket) -> int:
        return ticket.num_tokens if self._tokens_ready is None else self._tokens_ready

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        await self._check()

    async def _check(self) -> None:
        if self.fails_with is not None:
            raise self.fails_with
        await self.answers.wait()


class FakeReader:
    """Reads end when the test says so."""

    def __init__(self) -> None:
        self.connected: list[str] = []
        self.reads: list[tuple[str, tuple[BlockId, ...], tuple[BlockId, ...]]] = []
        """Agent, and the blocks on both sides that hold the tokens read."""
        self.tokens: list[range] = []
        self.refuses = False
        self.works = asyncio.Event()
        self.works.set()
        """Cleared: calls do not return."""
        self._ended: list[asyncio.Future[ReadEnd]] = []

    async def connect(self, peer: TransportEndpoint, fingerprint: Fingerprint) -> None:
        await self.works.wait()
        self.connected.append(peer.agent)

    async def disconnect(self, agent: str) -> None:
        await self.works.wait()
        assert all(future.done() for future in self._ended), "disconnected while a read is pending"
        self.connected.remove(agent)

    async def read(
        self, agent: str, remote_table: Sequence[BlockId], local_table: Sequence[BlockId], tokens: range
    ) -> Read:
        assert agent in self.connected
        await self.works.wait()
        if self.refuses:
            raise TransferFailed("the read could not be started")
        blocks = slice(tokens.start // BLOCK_SIZE, -(-tokens.stop // BLOCK_SIZE))
        self.reads.append((agent, tuple(remote_table[blocks]), tuple(local_table[blocks])))
        self.tokens.append(tokens)
        self._ended.append(asyncio.get_running_loop().create_future())
        return Read(len(self.reads[-1][1]) * BLOCK_BYTES, self._ended[-1])

    @property
    def num_pending(self) -> int:
        return sum(not future.done() for future in self._ended)

    def end(
        self, status: FetchStatus = FetchStatus.DONE, checksums: Mapping[int, int] = NO_CHECKSUMS
    ) -> None:
        """End the latest read."""
        self._ended[-1].set_result(ReadEnd(status, checksums))


class DecodeBench:
    """One decode session with everything around it faked. To be built on a running loop."""

    def __init__(
        self,
        on_kv_failure: OnKvFailure = OnKvFailure.RECOMPUTE,
        *,
        fetch_limit_s: float = 30.0,
    ) -> None:
        clock = asyncio.get_running_loop().time
        self.health = Health()
        self.owner = FakeOwner()
        self.reader = FakeReader()
        link: EngineLink[Command, Event] = EngineLink(self._make_engine, self.health)
        link.start()
        self.peers = Peers(
            lambda address: self.owner,
            self.reader,
            FINGERPRINT,
            connect_timeout_s=10.0,
            forget_after_s=10.0,
            clock=clock,
        )
        self.tasks = TaskSet(self.health)
        self.registry = CollectorRegistry()
        self.refusal: SplitserveError | None = None
        self.link = link
        self.credit = CreditBook(0.0, largest=1)
        self.tools = IntakeTools(
            engine=link,
            peers=self.peers,
            reader=self.reader,
            tasks=self.tasks,
            health=self.health,
            metrics=DecodeMetrics(self.registry, lambda: self.peers.num_connected),
            credit=self.credit,
            config=DecodeWorkerConfig(on_kv_failure=on_kv_failure, fetch_limit_s=fetch_limit_s),
            block_size=BLOCK_SIZE,
            clock=clock,
        )
        self.session = self.new_session()

    def new_session(self) -> DecodeSession:
        """Of one more router."""
        return DecodeSession(self.tools, lambda: self.refusal)

    def _make_engine(self, on_events: object) -> ScriptedEngine:
        self.engine = ScriptedEngine(on_events)  # type: ignore[arg-type]
        return self.engine

    def submit(
        self,
        request: GenerationRequest | None = None,
        ticket: Ticket | None = None,
        first_tokens: Mapping[int, int] | None = FIRST_TOKEN,
    ) -> None:
        """`first_tokens`: token id by choice, of a prefill that is done already; None: it is not."""
        request = request or make_request()
        wire_ticket = ticket_to_wire(ticket or make_ticket(request))
        submit = pb.DecodeSubmit(request=request_to_wire(request), ticket=wire_ticket)
        self.session.on_command(pb.DecodeCommand(submit=submit))
        if first_tokens is not None:
            self.begin(first_tokens, request.request_id)

    def submit_early(self, request: GenerationRequest | None = None, tokens_ready: int = 0) -> None:
        """While the prefill runs and has got so far."""
        request = request or make_request()
        self.owner.compute(tokens_ready)
        self.submit(request, make_ticket(request, tokens_ready=tokens_ready), None)

    def submit_without_ticket(self, request: GenerationRequest | None = None) -> None:
        submit = pb.DecodeSubmit(request=request_to_wire(request or make_request()))
        self.session.on_command(pb.DecodeCommand(submit=submit))

    def begin(self, first_tokens: Mapping[int, int] = FIRST_TOKEN, name: str = "r") -> None:
        firsts = [
            pb.FirstToken(index=index, token=token_to_wire(Token(token_id)))
            for index, token_id in first_tokens.items()
        ]
        self.session.on_command(pb.DecodeCommand(begin=pb.Begin(request_id=name, first_tokens=firsts)))

    def abort(self, name: str = "r") -> None:
        self.session.on_command(pb.DecodeCommand(abort_request_id=name))

    def abort_choice(self, index: int) -> None:
        abort = pb.AbortChoice(request_id="r", index=index)
        self.session.on_command(pb.DecodeCommand(abort_choice=abort))

    def reserved(self) -> SequenceId:
        """The id of the sequence that was reserved with the only command so far."""
        (command,) = self.engine.take()
        assert isinstance(command, ReserveSequence)
        return command.seq_id

    def allocate(
        self, seq_id: SequenceId, blocks: tuple[int, ...] = (41, 42, 43), num_cached: int = 0
    ) -> None:
        self.engine.emit(BlocksAllocated(seq_id, tuple(map(BlockId, blocks)), num_cached))

    def sample(
        self, seq_id: SequenceId, token_id: int, reason: FinishReason | None = None, index: int = 0
    ) -> None:
        self.engine.emit(TokensSampled(seq_id, (Token(token_id),), reason, 0, index))

    async def until_fetching(self, seq_id: SequenceId | None = None) -> SequenceId:
        """Let a submitted request get into its (only) read."""
        await settle()
        seq_id = seq_id or self.reserved()
        self.allocate(seq_id)
        await settle()
        assert self.reader.num_pending == 1
        return seq_id

    def frame(self) -> pb.DecodeFrame:
        """What waits to be sent since the last call."""
        frame = self.session.outbox.take()
        frame.ClearField("load")
        frame.ClearField("credit")
        return frame

    def failure(self) -> SplitserveError:
        """The one failure of the frame, of the request `r`."""
        (wire,) = self.frame().failures
        assert wire.request_id == "r"
        return failure_from_wire(wire)

    def credit_told(self) -> tuple[int, int]:
        """(blocks, submissions) as the next frame has them. Takes that frame."""
        credit = self.session.outbox.take().credit
        return credit.blocks, credit.num_submissions

    def assert_idle(self) -> None:
        """Nothing is left of any request: no task, no listener, no peer in use, no promise, no call."""
        assert len(self.session) == 0
        assert len(self.tasks) == 0
        assert self.link.num_listeners == 0
        assert self.peers.num_used == 0
        assert self.credit.num_accepted == 0
        assert self.owner.num_waiting == 0


def make_ticket(request: GenerationRequest, **changes: object) -> Ticket:
    num_blocks = -(-request.num_tokens // BLOCK_SIZE)
    fields: dict[str, object] = {
        "ticket_id": TicketId(f"t-{request.request_id}"),
        "owner": P0,
        "owner_address": "10.0.0.1:5",
        "block_ids": tuple(BlockId(7 + i) for i in range(num_blocks)),
        "num_tokens": request.num_tokens,
        "tokens_ready": request.num_tokens,
        "lease_s": LEASE_S,
    }
    return Ticket(**(fields | changes))  # type: ignore[arg-type]
