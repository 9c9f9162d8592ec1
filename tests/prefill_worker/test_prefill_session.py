"""Prompts in, tickets out, and every way a ticket ends. Virtual time; each test ends with a leak check."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry
from virtual_time import settle, virtual_time
from worker_fakes import BLOCK_SIZE, P0, ScriptedEngine, make_request

from engine import (
    AbortSequence,
    AddSequence,
    BlocksAllocated,
    Command,
    Event,
    PrefillProgressed,
    ReleaseSequence,
    SequenceFailed,
    TokensSampled,
)
from prefill_worker.holder import Holder
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.session import PrefillSession
from protocol.codec import failure_from_wire, request_to_wire, ticket_from_wire
from protocol.errors import (
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    Overloaded,
    SplitserveError,
    WorkerUnavailable,
)
from protocol.generation import FinishReason, GenerationRequest, Token
from protocol.handoff import Ticket, Verdict
from protocol.ids import BlockId, SequenceId
from protocol.wire import splitserve_pb2 as pb
from rpc import EngineLink, Health

LEASE_S = 9.0
OWNER = P0.incarnation


class PrefillBench:
    """One prefill session with its engine faked. To be built on a running loop."""

    def __init__(self) -> None:
        clock = asyncio.get_running_loop().time
        self.health = Health()
        self.link: EngineLink[Command, Event] = EngineLink(self._make_engine, self.health)
        self.link.start()
        self.registry = CollectorRegistry()
        metrics = PrefillMetrics(self.registry, lambda: len(self.holder))
        self.holder = Holder(
            identity=P0,
            address=lambda: "10.0.0.1:5",
            block_size=BLOCK_SIZE,
            lease_s=LEASE_S,
            release_sequence=lambda seq_id: self.link.post(ReleaseSequence(seq_id)),
            metrics=metrics,
            clock=clock,
        )
        self.expiry = asyncio.create_task(self.holder.expire_forever())
        self.refusal: SplitserveError | None = None
        self.session = PrefillSession(self.link, self.holder, lambda: self.refusal, metrics, clock)

    def _make_engine(self, on_events: Callable[..., None]) -> ScriptedEngine:
        self.engine = ScriptedEngine(on_events)
        return self.engine

    def submit(self, request: GenerationRequest | None = None) -> None:
        self.session.on_command(pb.PrefillCommand(submit=request_to_wire(request or make_request())))

    def abort(self, name: str = "r") -> None:
        self.session.on_command(pb.PrefillCommand(abort_request_id=name))

    def added(self) -> SequenceId:
        """The id of the sequence that was added with the only command so far."""
        (command,) = self.engine.take()
        assert isinstance(command, AddSequence)
        assert command.hold
        return command.seq_id

    async def compute(
        self, seq_id: SequenceId, reason: FinishReason | None = None, num_tokens: int = 10
    ) -> None:
        """Let the engine run the prompt up to the first token."""
        self.engine.emit(BlocksAllocated(seq_id, tuple(map(BlockId, (7, 8, 9, 10))), 4))
        self.engine.emit(
            PrefillProgressed(seq_id, num_tokens), TokensSampled(seq_id, (Token(77, -0.5),), reason, 4)
        )
        await settle()

    async def hold(self, request: GenerationRequest | None = None) -> tuple[SequenceId, Ticket]:
        """A request whose ticket has been handed out."""
        self.submit(request)
        seq_id = self.added()
        await self.compute(seq_id)
        (done,) = self.frame().done
        return seq_id, ticket_from_wire(done.ticket)

    def frame(self) -> pb.PrefillFrame:
        """What waits to be sent since the last call."""
        return self.session.outbox.take()

    def sample(self, name: str) -> float:
        return self.registry.get_sample_value(name) or 0.0

    def assert_idle(self) -> None:
        assert len(self.session) == 0
        assert len(self.holder) == 0
        assert self.link.num_listeners == 0
        assert not self.expiry.done()


def failure(bench: PrefillBench) -> SplitserveError:
    (wire,) = bench.frame().failures
    return failure_from_wire(wire)


@virtual_time
async def test_first_token_leaves_with_the_ticket_and_the_reader_frees_the_blocks() -> None:
    bench = PrefillBench()
    bench.submit(make_request(outputs=(5, 6), num_prompt=8))
    (add,) = bench.engine.take()
    assert isinstance(add, AddSequence)
    assert add.output_token_ids == (5, 6)
    await asyncio.sleep(0.5)
    bench.engine.emit(BlocksAllocated(add.seq_id, tuple(map(BlockId, (7, 8, 9, 10))), 4))
    await asyncio.sleep(0.25)
    bench.engine.emit(
        PrefillProgressed(add.seq_id, 10), TokensSampled(add.seq_id, (Token(77, -0.5),), None, 4)
    )
    await settle()
    (done,) = bench.frame().done
    assert done.first.tokens[0].token_id == 77
    assert done.first.receipt.prefill_queue_s == pytest.approx(0.5)
    assert done.first.receipt.prefill_s == pytest.approx(0.25)
    assert done.first.receipt.num_cached_tokens == 4
    ticket = ticket_from_wire(done.ticket)
    assert (ticket.block_ids, ticket.num_tokens, ticket.tokens_ready) == ((7, 8, 9), 10, 10)
    assert (ticket.owner, ticket.owner_address, ticket.lease_s) == (P0, "10.0.0.1:5", LEASE_S)
    assert len(bench.holder) == 1
    assert bench.holder.release(OWNER, ticket.ticket_id) is Verdict.VALID
    assert bench.engine.take() == [ReleaseSequence(add.seq_id)]
    assert bench.holder.release(OWNER, ticket.ticket_id) is Verdict.VALID
    assert bench.engine.take() == []
    bench.assert_idle()


@pytest.mark.parametrize("reason", FinishReason)
def test_request_that_ends_with_its_first_token_holds_nothing(reason: FinishReason) -> None:
    @virtual_time
    async def run() -> None:
        bench = PrefillBench()
        bench.submit()
        await bench.compute(bench.added(), reason)
        (done,) = bench.frame().done
        assert done.first.finish_reason == reason.value
        assert not done.HasField("ticket")
        assert bench.engine.take() == []
        bench.assert_idle()

    run()


@virtual_time
async def test_ticket_ids_are_never_used_twice() -> None:
    bench = PrefillBench()
    tickets = [(await bench.hold())[1].ticket_id for _ in range(20)]
    assert len(set(tickets)) == 20
    bench.holder.drop_all()
    bench.assert_idle()


@virtual_time
async def test_abort_drops_a_queued_or_running_sequence() -> None:
    bench = PrefillBench()
    bench.submit()
    seq_id = bench.added()
    bench.abort()
    assert bench.engine.take() == [AbortSequence(seq_id)]
    await bench.compute(seq_id)
    assert not bench.frame().done
    bench.abort("nobody")
    bench.assert_idle()


@virtual_time
async def test_abort_that_crosses_the_hand_off_drops_the_ticket() -> None:
    bench = PrefillBench()
    seq_id, ticket = await bench.hold()
    bench.abort()
    assert bench.engine.take() == [ReleaseSequence(seq_id)]
    assert bench.holder.release(OWNER, ticket.ticket_id) is Verdict.EXPIRED
    bench.assert_idle()


@virtual_time
async def test_router_that_offers_the_ticket_to_nobody_releases_it() -> None:
    bench = PrefillBench()
    seq_id, ticket = await bench.hold()
    bench.session.on_command(pb.PrefillCommand(release_ticket_id=ticket.ticket_id))
    bench.session.on_command(pb.PrefillCommand(release_ticket_id=ticket.ticket_id))
    assert bench.engine.take() == [ReleaseSequence(seq_id)]
    assert bench.holder.release(OWNER, ticket.ticket_id) is Verdict.EXPIRED
    bench.assert_idle()


@virtual_time
async def test_lapsed_lease_frees_the_blocks_though_nothing_else_happens() -> None:
    """Reclaim that runs only when new work is scheduled leaves an idle worker full."""
    bench = PrefillBench()
    seq_id, ticket = await bench.hold()
    await asyncio.sleep(LEASE_S - 0.1)
    assert bench.engine.take() == []
    await asyncio.sleep(0.2)
    assert bench.engine.take() == [ReleaseSequence(seq_id)]
    assert bench.holder.release(OWNER, ticket.ticket_id) is Verdict.EXPIRED
    assert not bench.holder.renew(OWNER, ticket.ticket_id).held
    assert bench.sample("splitserve_lease_expired_total") == 1
    bench.assert_idle()


@virtual_time
async def test_renewed_lease_holds() -> None:
    bench = PrefillBench()
    _, ticket = await bench.hold()
    for _ in range(10):
        await asyncio.sleep(LEASE_S / 3)
        status = bench.holder.renew(OWNER, ticket.ticket_id)
        assert (status.held, status.tokens_ready, status.lease_s) == (True, 10, LEASE_S)
    assert bench.holder.release(OWNER, ticket.ticket_id) is Verdict.VALID
    bench.assert_idle()


@virtual_time
async def test_ticket_of_another_incarnation_is_unknown() -> None:
    bench = PrefillBench()
    _, ticket = await bench.hold()
    assert bench.holder.release("p-second", ticket.ticket_id) is Verdict.UNKNOWN
    assert not bench.holder.renew("p-second", ticket.ticket_id).held
    assert len(bench.holder) == 1
    bench.holder.drop_all()
    bench.assert_idle()


@virtual_time
async def test_session_end_drops_what_was_not_handed_out_and_keeps_tickets_that_left() -> None:
    bench = PrefillBench()
    held, ticket = await bench.hold(make_request("left"))
    bench.submit(make_request("running"))
    running = bench.added()
    bench.session.end()
    bench.session.end()
    assert bench.engine.take() == [AbortSequence(running)]
    assert bench.holder.renew(OWNER, ticket.ticket_id).held
    await asyncio.sleep(LEASE_S + 1)
    assert bench.engine.take() == [ReleaseSequence(held)]
    bench.assert_idle()


@virtual_time
async def test_ticket_in_a_frame_that_never_left_is_dropped_with_the_session() -> None:
    bench = PrefillBench()
    bench.submit()
    seq_id = bench.added()
    await bench.compute(seq_id)
    assert len(bench.holder) == 1
    bench.session.end()
    assert bench.engine.take() == [ReleaseSequence(seq_id)]
    bench.assert_idle()


@virtual_time
async def test_deadline_ends_a_waiting_request() -> None:
    bench = PrefillBench()
    bench.submit(make_request(deadline_s=2.0))
    seq_id = bench.added()
    await asyncio.sleep(2.1)
    assert isinstance(failure(bench), DeadlineExceeded)
    assert bench.engine.take() == [AbortSequence(seq_id)]
    bench.assert_idle()


@virtual_time
async def test_engine_that_refuses_is_reported_as_it_said() -> None:
    bench = PrefillBench()
    bench.submit()
    bench.engine.emit(SequenceFailed(bench.added(), Overloaded("full", retry_after_s=1.5)))
    await settle()
    error = failure(bench)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 1.5
    bench.assert_idle()


@virtual_time
async def test_engine_that_has_just_ended_fails_the_request() -> None:
    bench = PrefillBench()
    bench.engine.refuses_with = EngineFault("broken")
    bench.submit()
    assert isinstance(failure(bench), EngineFault)
    bench.assert_idle()


@virtual_time
async def test_unfit_or_draining_worker_refuses() -> None:
    bench = PrefillBench()
    bench.refusal = WorkerUnavailable("shutting down")
    bench.submit()
    assert isinstance(failure(bench), WorkerUnavailable)
    assert bench.engine.take() == []
    bench.assert_idle()


@virtual_time
async def test_second_request_with_the_same_id_is_refused_and_the_first_goes_on() -> None:
    bench = PrefillBench()
    bench.submit()
    seq_id = bench.added()
    bench.submit()
    assert isinstance(failure(bench), InvalidRequest)
    await bench.compute(seq_id, FinishReason.STOP)
    assert len(bench.frame().done) == 1
    bench.assert_idle()


@virtual_time
async def test_same_request_may_come_again_after_its_end() -> None:
    bench = PrefillBench()
    first, _ = await bench.hold()
    second, _ = await bench.hold()
    assert first != second
    bench.holder.drop_all()
    bench.assert_idle()


@virtual_time
async def test_fault_fails_all_requests() -> None:
    bench = PrefillBench()
    bench.health.on_fault(bench.session.fail_all)
    bench.submit()
    bench.engine.fault = EngineFault("broken")
    bench.link.check()
    assert isinstance(failure(bench), EngineFault)
    bench.assert_idle()
