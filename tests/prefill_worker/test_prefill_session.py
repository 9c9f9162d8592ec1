"""Prompts in, tickets out, and every way a ticket ends. Virtual time; each test ends with a leak check."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prefill_bench import LEASE_S, ScriptedBench
from virtual_time import settle, virtual_time
from worker_fakes import P0, make_request

from engine import (
    AbortSequence,
    AddSequence,
    BlocksAllocated,
    PrefillProgressed,
    PromptScored,
    ReleaseSequence,
    SequenceFailed,
    TokensSampled,
)
from protocol.codec import ticket_from_wire, token_from_wire
from protocol.errors import (
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    LeaseExpired,
    Overloaded,
    WorkerUnavailable,
)
from protocol.generation import FinishReason, Token
from protocol.handoff import Verdict
from protocol.ids import BlockId, SequenceId
from protocol.wire import splitserve_pb2 as pb


@virtual_time
async def test_ticket_leaves_with_the_blocks_and_the_first_token_with_the_last_chunk() -> None:
    bench = ScriptedBench()
    bench.submit(make_request(outputs=(5, 6), num_prompt=8))
    (add,) = bench.engine.take()
    assert isinstance(add, AddSequence)
    assert add.output_token_ids == (5, 6)
    await asyncio.sleep(0.5)
    await bench.allocate(add.seq_id)
    frame = bench.frame()
    (issued,) = frame.tickets
    assert issued.request_id == "r"
    assert not frame.done
    ticket = ticket_from_wire(issued.ticket)
    assert (ticket.block_ids, ticket.num_tokens, ticket.tokens_ready) == ((7, 8, 9), 10, 4)
    assert (ticket.owner, ticket.owner_address, ticket.lease_s) == (P0, "10.0.0.1:5", LEASE_S)
    await asyncio.sleep(0.25)
    await bench.finish(add.seq_id)
    frame = bench.frame()
    (done,) = frame.done
    assert not frame.tickets
    assert done.firsts[0].tokens[0].token_id == 77
    assert done.firsts[0].receipt.prefill_queue_s == pytest.approx(0.5)
    assert done.firsts[0].receipt.prefill_s == pytest.approx(0.25)
    assert done.firsts[0].receipt.num_cached_tokens == 4
    assert len(bench.holder) == 1
    assert bench.sample("splitserve_tickets_early_total") == 1
    assert await bench.release(ticket) is Verdict.VALID
    assert bench.engine.take() == [ReleaseSequence(add.seq_id)]
    assert await bench.release(ticket) is Verdict.VALID
    assert bench.engine.take() == []
    bench.assert_idle()


@virtual_time
async def test_progress_reaches_the_lease_chunk_by_chunk_and_ends_with_the_first_tokens() -> None:
    """A reader that has all tokens may release the sequence, which has to sample before it goes."""
    bench = ScriptedBench()
    bench.submit()
    seq_id = bench.added()
    await bench.allocate(seq_id)
    ticket = bench.ticket()
    for num_computed, tokens_ready in ((6, 6), (8, 8), (10, 8)):
        await bench.emit(PrefillProgressed(seq_id, num_computed))
        assert (await bench.renew(ticket)).tokens_ready == tokens_ready
    await bench.emit(TokensSampled(seq_id, (Token(77),), None, 4))
    assert (await bench.renew(ticket)).tokens_ready == 10
    assert await bench.release(ticket) is Verdict.VALID
    bench.assert_idle()


@virtual_time
async def test_first_token_before_the_last_chunk_is_the_engines_fault() -> None:
    """Its KV cannot be trusted; and a lease that can never lapse must not stay behind."""
    bench = ScriptedBench()
    bench.submit()
    seq_id = bench.added()
    await bench.allocate(seq_id)
    await bench.emit(TokensSampled(seq_id, (Token(77),), None, 4))
    assert isinstance(bench.health.fault, EngineFault)
    assert not bench.frame().done
    bench.session.fail_all(bench.health.fault)  # as the worker does at a fault
    bench.holder.drop_all()
    assert isinstance(bench.failure(), EngineFault)
    bench.assert_idle()


@virtual_time
async def test_prefill_that_starts_over_fails_its_request_and_voids_its_ticket() -> None:
    """The cache was reset: what a reader may have read already is stale."""
    bench = ScriptedBench()
    bench.submit()
    seq_id = bench.added()
    await bench.allocate(seq_id)
    ticket = bench.ticket()
    reader = bench.wait(ticket, tokens_known=4)
    await settle()
    await bench.allocate(seq_id, num_cached_tokens=0)
    error = bench.failure()
    assert isinstance(error, WorkerUnavailable)
    assert error.retryable
    assert not (await reader).held
    assert bench.engine.take() == [ReleaseSequence(seq_id)]
    assert await bench.release(ticket) is Verdict.EXPIRED
    bench.assert_idle()


@virtual_time
async def test_reader_that_gives_up_before_the_prefill_is_done_ends_it_and_the_router_hears() -> None:
    bench = ScriptedBench()
    bench.submit()
    seq_id = bench.added()
    await bench.allocate(seq_id)
    ticket = bench.ticket()
    assert await bench.release(ticket) is Verdict.EXPIRED
    assert bench.engine.take() == [ReleaseSequence(seq_id)]
    assert isinstance(bench.failure(), LeaseExpired)
    await bench.finish(seq_id)
    assert not bench.frame().done
    bench.assert_idle()


@virtual_time
async def test_router_that_gives_the_ticket_up_early_is_told_nothing() -> None:
    bench = ScriptedBench()
    bench.submit()
    seq_id = bench.added()
    await bench.allocate(seq_id)
    bench.give_up(bench.ticket())
    assert bench.engine.take() == [ReleaseSequence(seq_id)]
    assert not bench.frame().failures
    bench.assert_idle()


@virtual_time
async def test_ticket_given_up_by_another_router_fails_the_request_of_the_first() -> None:
    bench = ScriptedBench()
    bench.submit()
    seq_id = bench.added()
    await bench.allocate(seq_id)
    ticket = bench.ticket()
    bench.open_session().on_command(pb.PrefillCommand(release_ticket_id=ticket.ticket_id))
    assert bench.engine.take() == [ReleaseSequence(seq_id)]
    assert isinstance(bench.failure(), LeaseExpired)
    bench.assert_idle()


@pytest.mark.parametrize("error", [Overloaded("full"), EngineFault("broken")])
@virtual_time
async def test_sequence_that_fails_with_its_ticket_out_takes_the_ticket_along(error: Overloaded) -> None:
    bench = ScriptedBench()
    bench.submit()
    seq_id = bench.added()
    await bench.allocate(seq_id)
    ticket = bench.ticket()
    await bench.emit(SequenceFailed(seq_id, error))
    assert type(bench.failure()) is type(error)
    assert await bench.release(ticket) is Verdict.EXPIRED
    bench.assert_idle()


@pytest.mark.parametrize("reason", FinishReason)
@virtual_time
async def test_request_that_ends_with_its_first_token_holds_nothing(reason: FinishReason) -> None:
    bench = ScriptedBench()
    bench.submit()
    seq_id = bench.added()
    await bench.allocate(seq_id)
    ticket = bench.ticket()
    await bench.finish(seq_id, reason)
    (done,) = bench.frame().done
    assert done.firsts[0].finish_reason == reason.value
    assert await bench.release(ticket) is Verdict.EXPIRED
    assert bench.sample("splitserve_lease_expired_total") == 0
    bench.assert_idle()


@virtual_time
async def test_ticket_ids_are_never_used_twice() -> None:
    bench = ScriptedBench()
    tickets = [(await bench.hold())[1].ticket_id for _ in range(20)]
    assert len(set(tickets)) == 20
    bench.holder.drop_all()
    bench.assert_idle()


@virtual_time
async def test_abort_drops_a_queued_or_running_sequence() -> None:
    bench = ScriptedBench()
    bench.submit()
    seq_id = bench.added()
    bench.abort()
    assert bench.engine.take() == [AbortSequence(seq_id)]
    await bench.compute(seq_id)
    frame = bench.frame()
    assert not frame.done
    assert not frame.tickets
    bench.abort("nobody")
    bench.assert_idle()


@virtual_time
async def test_abort_that_crosses_the_hand_off_drops_the_ticket() -> None:
    bench = ScriptedBench()
    seq_id, ticket = await bench.hold()
    bench.abort()
    assert bench.engine.take() == [ReleaseSequence(seq_id)]
    assert await bench.release(ticket) is Verdict.EXPIRED
    bench.assert_idle()


@virtual_time
async def test_router_that_offers_the_ticket_to_nobody_releases_it() -> None:
    bench = ScriptedBench()
    seq_id, ticket = await bench.hold()
    bench.give_up(ticket)
    bench.give_up(ticket)
    assert bench.engine.take() == [ReleaseSequence(seq_id)]
    assert await bench.release(ticket) is Verdict.EXPIRED
    bench.assert_idle()


@virtual_time
async def test_lapsed_lease_frees_the_blocks_though_nothing_else_happens() -> None:
    """Reclaim that runs only when new work is scheduled leaves an idle worker full."""
    bench = ScriptedBench()
    seq_id, ticket = await bench.hold()
    await asyncio.sleep(LEASE_S - 0.1)
    assert bench.engine.take() == []
    await asyncio.sleep(0.2)
    assert bench.engine.take() == [ReleaseSequence(seq_id)]
    assert await bench.release(ticket) is Verdict.EXPIRED
    assert not (await bench.renew(ticket)).held
    assert bench.sample("splitserve_lease_expired_total") == 1
    bench.assert_idle()


@virtual_time
async def test_renewed_lease_holds() -> None:
    bench = ScriptedBench()
    _, ticket = await bench.hold()
    for _ in range(10):
        await asyncio.sleep(LEASE_S / 3)
        status = await bench.renew(ticket)
        assert (status.held, status.tokens_ready, status.lease_s) == (True, 10, LEASE_S)
    assert await bench.release(ticket) is Verdict.VALID
    bench.assert_idle()


@virtual_time
async def test_ticket_of_another_incarnation_is_unknown() -> None:
    bench = ScriptedBench()
    _, ticket = await bench.hold()
    released = await bench.holder.release("p-second", ticket.ticket_id, "a")
    assert released.verdict is Verdict.UNKNOWN
    assert not (await bench.holder.renew("p-second", ticket.ticket_id)).held
    assert len(bench.holder) == 1
    bench.holder.drop_all()
    bench.assert_idle()


@virtual_time
async def test_session_end_drops_what_is_computed_and_keeps_tickets_whose_prefill_is_done() -> None:
    bench = ScriptedBench()
    held, ticket = await bench.hold(make_request("left"))
    bench.submit(make_request("running"))
    running = bench.added()
    await bench.allocate(running)
    early = bench.ticket()
    bench.submit(make_request("queued"))
    queued = bench.added()
    bench.session.end()
    bench.session.end()
    assert bench.engine.take() == [ReleaseSequence(running), AbortSequence(queued)]
    assert await bench.release(early) is Verdict.EXPIRED
    assert (await bench.renew(ticket)).held
    await asyncio.sleep(LEASE_S + 1)
    assert bench.engine.take() == [ReleaseSequence(held)]
    bench.assert_idle()


@virtual_time
async def test_prefill_whose_end_the_router_never_heard_of_is_dropped_with_the_session() -> None:
    bench = ScriptedBench()
    bench.submit()
    seq_id = bench.added()
    await bench.allocate(seq_id)
    bench.frame()
    await bench.finish(seq_id)
    assert len(bench.holder) == 1
    bench.session.end()
    assert bench.engine.take() == [ReleaseSequence(seq_id)]
    bench.assert_idle()


@virtual_time
async def test_deadline_ends_a_waiting_request() -> None:
    bench = ScriptedBench()
    bench.submit(make_request(deadline_s=2.0))
    seq_id = bench.added()
    await asyncio.sleep(2.1)
    assert isinstance(bench.failure(), DeadlineExceeded)
    assert bench.engine.take() == [AbortSequence(seq_id)]
    bench.assert_idle()


@virtual_time
async def test_engine_that_refuses_is_reported_as_it_said() -> None:
    bench = ScriptedBench()
    bench.submit()
    bench.engine.emit(SequenceFailed(bench.added(), Overloaded("full", retry_after_s=1.5)))
    await settle()
    error = bench.failure()
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 1.5
    bench.assert_idle()


@virtual_time
async def test_engine_that_has_just_ended_fails_the_request() -> None:
    bench = ScriptedBench()
    bench.engine.refuses_with = EngineFault("broken")
    bench.submit()
    assert isinstance(bench.failure(), EngineFault)
    bench.assert_idle()


@virtual_time
async def test_unfit_or_draining_worker_refuses() -> None:
    bench = ScriptedBench()
    bench.refusal = WorkerUnavailable("shutting down")
    bench.submit()
    assert isinstance(bench.failure(), WorkerUnavailable)
    assert bench.engine.take() == []
    bench.assert_idle()


@virtual_time
async def test_second_request_with_the_same_id_is_refused_and_the_first_goes_on() -> None:
    bench = ScriptedBench()
    bench.submit()
    seq_id = bench.added()
    bench.submit()
    assert isinstance(bench.failure(), InvalidRequest)
    await bench.compute(seq_id, FinishReason.STOP)
    assert len(bench.frame().done) == 1
    bench.assert_idle()


@virtual_time
async def test_same_request_may_come_again_after_its_end() -> None:
    bench = ScriptedBench()
    first, _ = await bench.hold()
    second, _ = await bench.hold()
    assert first != second
    bench.holder.drop_all()
    bench.assert_idle()


@virtual_time
async def test_fault_fails_all_requests() -> None:
    bench = ScriptedBench()
    bench.health.on_fault(bench.session.fail_all)
    bench.submit()
    bench.engine.fault = EngineFault("broken")
    bench.link.check()
    assert isinstance(bench.failure(), EngineFault)
    bench.assert_idle()


def sampled(seq_id: SequenceId, index: int, reason: FinishReason | None = None) -> TokensSampled:
    return TokensSampled(seq_id, (Token(70 + index),), reason, 4, index)


@virtual_time
async def test_choices_share_one_sequence_and_one_ticket() -> None:
    bench = ScriptedBench()
    bench.submit(replace(make_request(), n=3))
    (add,) = bench.engine.take()
    assert isinstance(add, AddSequence)
    assert (add.num_samples, add.index) == (3, 0)
    await bench.emit(BlocksAllocated(add.seq_id, tuple(map(BlockId, (7, 8, 9))), 4))
    ticket = bench.ticket()
    await bench.emit(PrefillProgressed(add.seq_id, 10), sampled(add.seq_id, 0))
    assert not bench.frame().done  # the first tokens leave together
    assert (await bench.renew(ticket)).tokens_ready == 4
    bench.engine.emit(sampled(add.seq_id, 2), sampled(add.seq_id, 1, FinishReason.STOP))
    await settle()
    (done,) = bench.frame().done
    assert [(f.index, f.tokens[0].token_id, f.finish_reason) for f in done.firsts] == [
        (0, 70, ""),
        (1, 71, "stop"),
        (2, 72, ""),
    ]
    assert await bench.release(ticket) is Verdict.VALID
    assert bench.engine.take() == [ReleaseSequence(add.seq_id)]
    bench.assert_idle()


@virtual_time
async def test_choices_that_all_end_with_their_first_tokens_hold_nothing() -> None:
    bench = ScriptedBench()
    bench.submit(replace(make_request(), n=2))
    seq_id = bench.added()
    await bench.allocate(seq_id)
    await bench.emit(*(sampled(seq_id, index, FinishReason.LENGTH) for index in range(2)))
    (done,) = bench.frame().done
    assert len(done.firsts) == 2
    bench.assert_idle()


@virtual_time
async def test_choice_that_goes_on_by_itself_keeps_its_number() -> None:
    bench = ScriptedBench()
    bench.submit(replace(make_request(outputs=(5,)), index=3))
    (add,) = bench.engine.take()
    assert isinstance(add, AddSequence)
    assert (add.num_samples, add.index) == (1, 3)
    bench.engine.emit(sampled(add.seq_id, 3, FinishReason.STOP))
    await settle()
    assert bench.frame().done[0].firsts[0].index == 3
    bench.assert_idle()


@virtual_time
async def test_abort_between_first_tokens_drops_the_whole_request() -> None:
    bench = ScriptedBench()
    bench.submit(replace(make_request(), n=2))
    seq_id = bench.added()
    bench.engine.emit(sampled(seq_id, 0))
    await settle()
    bench.abort()
    assert bench.engine.take() == [AbortSequence(seq_id)]
    bench.engine.emit(sampled(seq_id, 1))
    await settle()
    assert not bench.frame().done
    bench.assert_idle()


@virtual_time
async def test_prompt_scores_ship_with_the_first_token() -> None:
    bench = ScriptedBench()
    bench.submit()
    seq_id = bench.added()
    for part in ((Token(2, -0.5), Token(3, -1.5, ((9, -0.1),))), (Token(4, -2.5),)):
        bench.engine.emit(PromptScored(seq_id, part))
    await bench.compute(seq_id, FinishReason.STOP)
    (done,) = bench.frame().done
    assert [token_from_wire(token) for token in done.prompt_logprobs] == [
        Token(2, -0.5),
        Token(3, -1.5, ((9, -0.1),)),
        Token(4, -2.5),
    ]
    bench.assert_idle()
