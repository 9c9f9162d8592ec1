"""Fakes around an intake: an owner and a reader that answer when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from prometheus_client import CollectorRegistry
from worker_fakes import BLOCK_SIZE, FINGERPRINT, P0, ScriptedEngine, make_request

from decode_worker.config import DecodeWorkerConfig, OnKvFailure
from decode_worker.intake import IntakeTools
from decode_worker.metrics import DecodeMetrics
from decode_worker.owner import OwnerHello
from decode_worker.peers import Peers
from decode_worker.reader import Read
from decode_worker.session import DecodeSession
from engine import BlocksAllocated, Command, Event, ReserveSequence, TokensSampled
from protocol.codec import request_to_wire, ticket_to_wire, token_to_wire
from protocol.errors import SplitserveError, TransferFailed
from protocol.generation import FinishReason, GenerationRequest, Token
from protocol.handoff import (
    Fingerprint,
    LeaseStatus,
    PoolDescription,
    Ticket,
    TransportEndpoint,
    Verdict,
)
from protocol.ids import BlockId, SequenceId, TicketId, WorkerIdentity
from protocol.ports import FetchStatus
from protocol.wire import splitserve_pb2 as pb
from rpc import EngineLink, Health, TaskSet

LEASE_S = 9.0
BLOCK_BYTES = 1000


class FakeOwner:
    """The owner of one worker's tickets."""

    def __init__(self, identity: WorkerIdentity = P0) -> None:
        self.identity = identity
        self.fingerprint: Fingerprint = FINGERPRINT
        self.agent = f"agent-{identity.incarnation}"
        self.calls: list[str] = []
        self.verdict = Verdict.VALID
        self.is_held = True
        self.fails_with: SplitserveError | None = None
        self.release_fails_with: SplitserveError | None = None
        self.is_closed = False

    async def connect(self) -> OwnerHello:
        self._called("connect")
        endpoint = TransportEndpoint("fake", self.agent, PoolDescription(100, BLOCK_BYTES), b"")
        return OwnerHello(self.identity, self.fingerprint, endpoint)

    async def renew(self, ticket: Ticket) -> LeaseStatus:
        self._called("renew")
        return LeaseStatus(self.is_held, ticket.num_tokens, ticket.lease_s)

    async def release(self, ticket: Ticket) -> Verdict:
        self._called("release")
        if self.release_fails_with is not None:
            raise self.release_fails_with
        return self.verdict

    async def close(self) -> None:
        self.is_closed = True

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.fails_with is not None:
            raise self.fails_with


class FakeReader:
    """Reads end when the test says so."""

    def __init__(self) -> None:
        self.connected: list[str] = []
        self.reads: list[tuple[str, tuple[BlockId, ...], tuple[BlockId, ...]]] = []
        self.refuses = False
        self.works = asyncio.Event()
        self.works.set()
        """Cleared: calls do not return."""
        self._ended: list[asyncio.Future[FetchStatus]] = []

    async def connect(self, peer: TransportEndpoint) -> None:
        await self.works.wait()
        self.connected.append(peer.agent)

    async def disconnect(self, agent: str) -> None:
        await self.works.wait()
        assert all(future.done() for future in self._ended), "disconnected while a read is pending"
        self.connected.remove(agent)

    async def read(
        self, agent: str, remote_blocks: Sequence[BlockId], local_blocks: Sequence[BlockId]
    ) -> Read:
        assert agent in self.connected
        await self.works.wait()
        if self.refuses:
            raise TransferFailed("the read could not be started")
        self.reads.append((agent, tuple(remote_blocks), tuple(local_blocks)))
        self._ended.append(asyncio.get_running_loop().create_future())
        return Read(len(remote_blocks) * BLOCK_BYTES, self._ended[-1])

    def end(self, status: FetchStatus = FetchStatus.DONE) -> None:
        """End the latest read."""
        self._ended[-1].set_result(status)


class DecodeBench:
    """One decode session with everything around it faked. To be built on a running loop."""

    def __init__(
        self, on_kv_failure: OnKvFailure = OnKvFailure.RECOMPUTE, *, fetch_limit_s: float = 30.0
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
        self.session = DecodeSession(
            IntakeTools(
                engine=link,
                peers=self.peers,
                reader=self.reader,
                tasks=self.tasks,
                health=self.health,
                metrics=DecodeMetrics(self.registry, lambda: self.peers.num_connected),
                config=DecodeWorkerConfig(on_kv_failure=on_kv_failure, fetch_limit_s=fetch_limit_s),
                block_size=BLOCK_SIZE,
                clock=clock,
            ),
            lambda: self.refusal,
        )

    def _make_engine(self, on_events: object) -> ScriptedEngine:
        self.engine = ScriptedEngine(on_events)  # type: ignore[arg-type]
        return self.engine

    def submit(self, request: GenerationRequest | None = None, ticket: Ticket | None = None) -> None:
        request = request or make_request()
        submit = pb.DecodeSubmit(
            request=request_to_wire(request),
            ticket=ticket_to_wire(ticket or make_ticket(request)),
            first_token=token_to_wire(Token(77)),
        )
        self.session.on_command(pb.DecodeCommand(submit=submit))

    def abort(self, name: str = "r") -> None:
        self.session.on_command(pb.DecodeCommand(abort_request_id=name))

    def reserved(self) -> SequenceId:
        """The id of the sequence that was reserved with the only command so far."""
        (command,) = self.engine.take()
        assert isinstance(command, ReserveSequence)
        return command.seq_id

    def allocate(
        self, seq_id: SequenceId, blocks: tuple[int, ...] = (41, 42, 43), num_cached: int = 0
    ) -> None:
        self.engine.emit(BlocksAllocated(seq_id, tuple(map(BlockId, blocks)), num_cached))

    def sample(self, seq_id: SequenceId, token_id: int, reason: FinishReason | None = None) -> None:
        self.engine.emit(TokensSampled(seq_id, (Token(token_id),), reason, 0))

    def frame(self) -> pb.DecodeFrame:
        """What waits to be sent since the last call."""
        frame = self.session.outbox.take()
        frame.ClearField("load")
        return frame

    def assert_idle(self) -> None:
        """Nothing is left of any request: no task, no listener, no peer in use."""
        assert len(self.session) == 0
        assert len(self.tasks) == 0
        assert self.link.num_listeners == 0
        assert self.peers.num_used == 0


def make_ticket(request: GenerationRequest, **changes: object) -> Ticket:
    num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    fields: dict[str, object] = {
        "ticket_id": TicketId(f"t-{request.request_id}"),
        "owner": P0,
        "owner_address": "10.0.0.1:5",
        "block_ids": tuple(BlockId(7 + i) for i in range(num_blocks)),
        "num_tokens": num_tokens,
        "tokens_ready": num_tokens,
        "lease_s": LEASE_S,
    }
    return Ticket(**(fields | changes))  # type: ignore[arg-type]
