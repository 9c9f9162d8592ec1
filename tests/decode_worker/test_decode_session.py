"""What one router sees of a decode worker: frames, choices, refusals, credit, and prompts computed here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from decode_fakes import DecodeBench
from virtual_time import settle, virtual_time
from worker_fakes import make_request

from engine import (
    AbortSequence,
    AddSequence,
    AdmitSequence,
    EngineStats,
    RecomputeSequence,
    ReserveSequence,
    TokensSampled,
)
from protocol.errors import (
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    WorkerUnavailable,
)
from protocol.generation import FinishReason, GenerationRequest, Token
from protocol.ids import SequenceId
from protocol.ports import FetchStatus
from protocol.wire import splitserve_pb2 as pb

FIVE = range(5)


@virtual_time
async def test_one_step_of_many_requests_makes_one_frame() -> None:
    bench = DecodeBench()
    names = [f"r{i}" for i in FIVE]
    seq_ids = []
    for name in names:
        bench.submit(make_request(name))
        await settle()
        seq_ids.append(bench.reserved())
        bench.allocate(seq_ids[-1])
        await settle()
        bench.reader.end()
        await settle()
        bench.engine.take()
    bench.engine.emit(*[TokensSampled(s, (Token(i),), None, 0) for i, s in enumerate(seq_ids)])
    await settle()
    assert [d.request_id for d in bench.frame().deltas] == names
    bench.session.end()
    bench.assert_idle()


# ---- refusals


@virtual_time
async def test_refused_request_leaves_its_ticket_to_another_worker() -> None:
    bench = DecodeBench()
    bench.refusal = WorkerUnavailable("shutting down")
    bench.submit()
    await settle()
    assert isinstance(bench.failure(), WorkerUnavailable)
    assert bench.owner.calls == []
    assert bench.engine.take() == []
    bench.assert_idle()


@virtual_time
async def test_second_request_with_the_same_id_is_refused_and_the_first_goes_on() -> None:
    bench = DecodeBench()
    bench.submit()
    seq_id = await bench.until_fetching()
    bench.submit(first_tokens=None)
    await settle()
    assert isinstance(bench.failure(), InvalidRequest)
    assert bench.owner.calls == ["connect"], "they share a ticket"
    bench.reader.end()
    await settle()
    assert bench.engine.take() == [AdmitSequence(seq_id, ((0, 77),))]
    bench.session.end()
    bench.assert_idle()


@virtual_time
async def test_ticket_that_cannot_be_read_is_refused() -> None:
    bench = DecodeBench()
    submit = pb.DecodeSubmit(request=pb.Request(request_id="r"), ticket=pb.Ticket(ticket_id="t"))
    bench.session.on_command(pb.DecodeCommand(submit=submit))
    assert isinstance(bench.failure(), InvalidRequest)
    bench.assert_idle()


# ---- choices


async def bench_of_choices(*first_tokens: int) -> tuple[DecodeBench, SequenceId]:
    """A session whose only request has 5 choices, of which 1, 2, ... go on; not allocated yet."""
    bench = DecodeBench()
    first = dict(enumerate(first_tokens, start=1))
    bench.submit(replace(make_request(), n=5), first_tokens=first)
    await settle()
    return bench, bench.reserved()


def told(bench: DecodeBench) -> list[tuple[int, int, str]]:
    return [(d.index, d.tokens[0].token_id, d.finish_reason) for d in bench.frame().deltas]


@virtual_time
async def test_choices_share_one_reservation_and_those_that_go_on_are_admitted() -> None:
    bench = DecodeBench()
    request = replace(make_request(outputs=(5,)), n=5)
    bench.submit(request, first_tokens={1: 71, 3: 73})
    await settle()
    (reserve,) = bench.engine.take()
    assert isinstance(reserve, ReserveSequence)
    assert (reserve.index, reserve.num_samples, reserve.output_token_ids) == (0, 5, (5,))
    assert reserve.sampling == request.sampling
    bench.allocate(reserve.seq_id, (41, 42, 43, 44))
    await settle()
    bench.reader.end()
    await settle()
    assert bench.engine.take() == [AdmitSequence(reserve.seq_id, ((1, 71), (3, 73)))]
    bench.abort()
    await settle()
    bench.assert_idle()


@virtual_time
async def test_choice_that_goes_on_by_itself_keeps_its_number() -> None:
    bench = DecodeBench()
    bench.submit(replace(make_request(outputs=(5,)), index=3), first_tokens={3: 73})
    await settle()
    (reserve,) = bench.engine.take()
    assert isinstance(reserve, ReserveSequence)
    assert (reserve.index, reserve.num_samples) == (3, 1)
    bench.abort()
    await settle()
    bench.assert_idle()


@virtual_time
async def test_each_choice_ends_by_itself_and_the_last_one_ends_the_request() -> None:
    bench, seq_id = await bench_of_choices(71, 72)
    bench.allocate(seq_id)
    await settle()
    bench.reader.end()
    await settle()
    bench.engine.take()
    bench.sample(seq_id, 100, index=1)
    bench.sample(seq_id, 200, FinishReason.STOP, index=2)
    await settle()
    frame = bench.frame()
    assert [(d.index, d.finish_reason) for d in frame.deltas] == [(1, ""), (2, "stop")]
    assert [d.HasField("receipt") for d in frame.deltas] == [True, False]
    assert len(bench.session) == 1
    bench.sample(seq_id, 101, FinishReason.LENGTH, index=1)
    await settle()
    assert told(bench) == [(1, 101, "length")]
    assert bench.engine.take() == []
    bench.assert_idle()


@virtual_time
async def test_dropped_choice_is_silent_and_the_others_go_on() -> None:
    bench, seq_id = await bench_of_choices(71, 72, 73)
    bench.allocate(seq_id)
    await settle()
    bench.reader.end()
    await settle()
    bench.engine.take()
    bench.abort_choice(2)
    bench.abort_choice(2)
    bench.abort_choice(9)
    assert bench.engine.take() == [AbortSequence(seq_id, 2)]
    for index in (1, 2, 3):
        bench.sample(seq_id, 100 + index, index=index)
    await settle()
    assert told(bench) == [(1, 101, ""), (3, 103, "")]
    bench.abort_choice(1)
    bench.abort_choice(3)
    assert bench.engine.take() == [AbortSequence(seq_id, 1), AbortSequence(seq_id)]
    bench.assert_idle()


@pytest.mark.parametrize("is_void", [False, True])
def test_choice_that_is_dropped_during_the_intake_is_not_handed_over(is_void: bool) -> None:
    @virtual_time
    async def run() -> None:
        bench, seq_id = await bench_of_choices(71, 72)
        bench.allocate(seq_id)
        await settle()
        bench.abort_choice(1)
        await settle()
        assert bench.engine.take() == []
        bench.reader.end(FetchStatus.FAILED if is_void else FetchStatus.DONE)
        await settle()
        kind = RecomputeSequence if is_void else AdmitSequence
        assert bench.engine.take() == [kind(seq_id, ((2, 72),))]
        bench.sample(seq_id, 102, FinishReason.STOP, index=2)
        await settle()
        assert told(bench) == [(2, 102, "stop")]
        bench.assert_idle()

    run()


@virtual_time
async def test_choice_that_is_dropped_before_the_beginning_does_not_come_back_with_it() -> None:
    bench = DecodeBench()
    bench.submit_early(replace(make_request(), n=3), tokens_ready=10)
    seq_id = await bench.until_fetching()
    bench.abort_choice(1)
    bench.reader.end()
    bench.begin({0: 70, 1: 71})
    await settle()
    assert bench.engine.take() == [AdmitSequence(seq_id, ((0, 70),))]
    bench.sample(seq_id, 100, FinishReason.STOP, index=0)
    await settle()
    assert told(bench) == [(0, 100, "stop")]
    bench.assert_idle()


@virtual_time
async def test_beginning_of_dropped_choices_alone_ends_the_request() -> None:
    bench = DecodeBench()
    bench.submit_early(replace(make_request(), n=2), tokens_ready=10)
    seq_id = await bench.until_fetching()
    bench.reader.end()
    await settle()
    bench.abort_choice(1)
    bench.begin({1: 71})
    await settle()
    assert bench.engine.take() == [AbortSequence(seq_id)]
    bench.assert_idle()


@virtual_time
async def test_last_choice_dropped_during_the_intake_ends_it() -> None:
    bench, seq_id = await bench_of_choices(71, 72)
    bench.abort_choice(1)
    bench.abort_choice(2)
    await settle()
    assert bench.engine.take() == [AbortSequence(seq_id)]
    assert bench.owner.calls == ["release"]
    bench.assert_idle()


@pytest.mark.parametrize("first_tokens", [{}, {5: 70}, {2: 72, 1: 71}, {0: 70, 7: 77}])
def test_first_tokens_that_do_not_fit_the_request_fail_it(first_tokens: dict[int, int]) -> None:
    @virtual_time
    async def run() -> None:
        bench = DecodeBench()
        bench.submit(replace(make_request(), n=5), first_tokens=first_tokens)
        await settle()
        error = bench.failure()
        assert isinstance(error, InvalidRequest)
        assert "first tokens" in error.message
        assert bench.owner.calls == ["release"]
        bench.assert_idle()

    run()


# ---- prompts computed here


@virtual_time
async def test_request_without_a_ticket_is_computed_here_and_all_its_tokens_are_sent() -> None:
    bench = DecodeBench()
    request = replace(make_request(outputs=(5,)), priority=3, cache_salt="s", index=2)
    bench.submit_without_ticket(request)
    await settle()
    (add,) = bench.engine.take()
    assert add == AddSequence(
        add.seq_id,
        request.prompt_token_ids,
        request.sampling,
        (5,),
        priority=3,
        cache_salt="s",
        index=2,
    )
    await asyncio.sleep(0.5)
    bench.engine.emit(TokensSampled(add.seq_id, (Token(100),), None, 8, 2))
    bench.engine.emit(TokensSampled(add.seq_id, (Token(101),), FinishReason.STOP, 8, 2))
    await settle()
    first, last = bench.frame().deltas
    assert (first.index, first.tokens[0].token_id) == (2, 100)
    assert first.receipt.prefill_s == pytest.approx(0.5)
    assert first.receipt.num_cached_tokens == 8
    assert (last.tokens[0].token_id, last.finish_reason) == (101, "stop")
    assert not last.HasField("receipt")
    assert bench.owner.calls == []
    bench.assert_idle()


@virtual_time
async def test_choices_of_a_request_without_a_ticket_end_one_by_one() -> None:
    bench = DecodeBench()
    bench.submit_without_ticket(replace(make_request(), n=2))
    await settle()
    (add,) = bench.engine.take()
    assert isinstance(add, AddSequence)
    assert add.num_samples == 2
    bench.sample(add.seq_id, 100, FinishReason.STOP, index=1)
    await settle()
    assert len(bench.session) == 1
    bench.sample(add.seq_id, 101, FinishReason.STOP, index=0)
    await settle()
    assert told(bench) == [(1, 100, "stop"), (0, 101, "stop")]
    bench.assert_idle()


def abort(bench: DecodeBench) -> None:
    bench.abort()


def end(bench: DecodeBench) -> None:
    bench.session.end()


@pytest.mark.parametrize("leave", [abort, end])
@pytest.mark.parametrize("is_added", [False, True])
def test_request_without_a_ticket_leaves_nothing_behind(
    is_added: bool, leave: Callable[[DecodeBench], None]
) -> None:
    @virtual_time
    async def run() -> None:
        bench = DecodeBench()
        bench.submit_without_ticket()
        if is_added:
            await settle()
            (add,) = bench.engine.take()
            leave(bench)
            assert bench.engine.take() == [AbortSequence(add.seq_id)]
        else:
            leave(bench)
            await settle()
            assert bench.engine.take() == []
        bench.assert_idle()

    run()


@virtual_time
async def test_choice_dropped_before_its_prompt_is_queued_is_dropped_then() -> None:
    bench = DecodeBench()
    bench.submit_without_ticket(replace(make_request(), n=3))
    bench.abort_choice(1)
    await settle()
    add, drop = bench.engine.take()
    assert isinstance(add, AddSequence)
    assert drop == AbortSequence(add.seq_id, 1)
    bench.session.end()
    bench.assert_idle()


@virtual_time
async def test_deadline_ends_a_request_that_is_computed_here() -> None:
    bench = DecodeBench()
    bench.submit_without_ticket(make_request(deadline_s=3.0))
    await settle()
    (add,) = bench.engine.take()
    await asyncio.sleep(3.1)
    assert isinstance(bench.failure(), DeadlineExceeded)
    assert bench.engine.take() == [AbortSequence(add.seq_id)]
    bench.assert_idle()


@virtual_time
async def test_engine_that_refuses_a_prompt_fails_its_request() -> None:
    bench = DecodeBench()
    bench.engine.refuses_with = EngineFault("broken")
    bench.submit_without_ticket()
    await settle()
    assert isinstance(bench.failure(), EngineFault)
    bench.assert_idle()


def scored() -> GenerationRequest:
    request = make_request()
    return replace(request, sampling=replace(request.sampling, prompt_logprobs=1))


@virtual_time
async def test_prompt_is_not_scored_here() -> None:
    bench = DecodeBench()
    bench.submit_without_ticket(scored())
    await settle()
    assert isinstance(bench.failure(), InvalidRequest)
    assert bench.engine.take() == []
    bench.assert_idle()


@virtual_time
async def test_nobody_begins_a_request_without_a_ticket() -> None:
    bench = DecodeBench()
    bench.submit_without_ticket()
    await settle()
    (add,) = bench.engine.take()
    bench.begin()
    await settle()
    assert isinstance(bench.failure(), InvalidRequest)
    assert bench.engine.take() == [AbortSequence(add.seq_id)]
    bench.assert_idle()


# ---- credit, of a pool of 100 blocks


@virtual_time
async def test_every_frame_tells_the_credit_and_how_many_submissions_are_in_it() -> None:
    bench = DecodeBench()
    assert bench.credit_told() == (100, 0)
    bench.submit()
    assert bench.credit_told() == (97, 1)
    await settle()
    seq_id = bench.reserved()
    bench.engine.stats = EngineStats(blocks_total=100, blocks_free=97)
    bench.allocate(seq_id)
    await settle()
    assert bench.credit_told() == (97, 1)
    bench.submit_without_ticket(make_request("local", num_prompt=20))
    assert bench.credit_told() == (91, 2)
    bench.session.end()
    bench.reader.end()
    await settle()
    assert bench.credit_told() == (100, 2)
    bench.assert_idle()


@virtual_time
async def test_refused_submission_counts_too() -> None:
    bench = DecodeBench()
    bench.submit()
    bench.submit(first_tokens=None)
    assert bench.credit_told() == (97, 2)
    bench.session.end()
    await settle()
    bench.assert_idle()


@virtual_time
async def test_routers_share_the_credit() -> None:
    bench = DecodeBench()
    other = bench.new_session()
    bench.submit()
    assert bench.credit_told() == (48, 1)
    other.end()
    other.end()
    assert bench.credit_told() == (97, 1)
    bench.session.end()
    await settle()
    bench.assert_idle()


@virtual_time
async def test_worker_that_takes_nothing_grants_nothing() -> None:
    bench = DecodeBench()
    bench.refusal = WorkerUnavailable("shutting down")
    assert bench.credit_told() == (0, 0)
    bench.assert_idle()


@virtual_time
async def test_demand_of_a_router_counts_until_it_changes_or_its_session_ends() -> None:
    bench = DecodeBench()
    credit = bench.tools.credit
    bench.session.on_command(pb.DecodeCommand(demanded_blocks=7))
    bench.session.on_command(pb.DecodeCommand(demanded_blocks=5))
    other = bench.new_session()
    other.on_command(pb.DecodeCommand(demanded_blocks=2))
    assert credit.num_demanded_blocks == 7
    other.on_command(pb.DecodeCommand(demanded_blocks=0))
    assert credit.num_demanded_blocks == 5
    bench.session.end()
    assert credit.num_demanded_blocks == 0
    other.end()
