"""Who frees what when a request ends early: every state at the decode worker x every way to end.

    state        client abort             P dies                     D's own session ends
    queued       drop, give back          silent: recompute or fail  drop, leave the ticket to others
    fetching     free after the read      ditto; at once, retryable  free after the read
    decoding     free at the next step    no effect                  free at the next step

Virtual time; each test ends with a leak check.
"""

from __future__ import annotations

import asyncio

import pytest
from decode_fakes import DecodeBench
from virtual_time import settle, virtual_time
from worker_fakes import P0, make_request

from decode_worker import OnKvFailure
from decode_worker.keeper import SILENCE_LIMIT_S
from engine import AbortSequence, AdmitSequence, RecomputeSequence, SequenceFailed
from protocol.errors import (
    DeadlineExceeded,
    EngineFault,
    TransferFailed,
    TransferTimeout,
)
from protocol.generation import FinishReason
from protocol.ids import SequenceId
from protocol.ports import FetchStatus

FIRST = ((0, 77),)
JUST_OVER_S = 0.2


async def bench_queued(
    policy: OnKvFailure = OnKvFailure.RECOMPUTE, *, is_computing: bool = False
) -> tuple[DecodeBench, SequenceId]:
    """The only request waits for blocks; with `is_computing`, its prefill still runs."""
    bench = DecodeBench(policy)
    if is_computing:
        bench.submit_early(tokens_ready=4)
    else:
        bench.submit()
    await settle()
    return bench, bench.reserved()


async def bench_in_fetch(policy: OnKvFailure = OnKvFailure.RECOMPUTE) -> tuple[DecodeBench, SequenceId]:
    """The only request is in the middle of its read."""
    bench = DecodeBench(policy)
    bench.submit()
    return bench, await bench.until_fetching()


async def bench_decoding() -> tuple[DecodeBench, SequenceId]:
    """The only request has its second token."""
    bench, seq_id = await bench_in_fetch()
    bench.reader.end()
    await settle()
    assert bench.engine.take() == [AdmitSequence(seq_id, FIRST)]
    bench.sample(seq_id, 100)
    await settle()
    bench.frame()
    bench.owner.calls.clear()
    return bench, seq_id


# ---- queued


@pytest.mark.parametrize("is_computing", [False, True])
def test_abort_in_the_queue_frees_blocks_and_ticket(is_computing: bool) -> None:
    @virtual_time
    async def run() -> None:
        bench, seq_id = await bench_queued(is_computing=is_computing)
        bench.abort()
        await settle()
        assert bench.engine.take() == [AbortSequence(seq_id)]
        assert bench.owner.calls == ["release"]
        assert not bench.frame().failures
        bench.assert_idle()

    run()


@virtual_time
async def test_abort_before_the_intake_has_taken_its_first_step_frees_the_ticket() -> None:
    bench = DecodeBench()
    bench.submit()
    bench.abort()
    await settle()
    assert bench.owner.calls == ["release"]
    assert bench.reader.reads == []
    bench.assert_idle()


@pytest.mark.parametrize("is_computing", [False, True])
def test_session_that_ends_leaves_the_tickets_of_its_queue_to_another_worker(is_computing: bool) -> None:
    """The router offers them again; a release would take them away. The broken call tells the owner."""

    @virtual_time
    async def run() -> None:
        bench, seq_id = await bench_queued(is_computing=is_computing)
        assert bench.owner.num_waiting == 1
        bench.session.end()
        await settle()
        assert bench.engine.take() == [AbortSequence(seq_id)]
        assert bench.owner.calls == []
        assert bench.owner.num_waiting == 0
        bench.assert_idle()

    run()


@virtual_time
async def test_owner_that_dies_while_a_request_is_queued_means_recompute() -> None:
    bench, seq_id = await bench_queued()
    bench.owner.die()
    await asyncio.sleep(SILENCE_LIMIT_S - JUST_OVER_S)
    assert bench.engine.take() == []
    await asyncio.sleep(2 * JUST_OVER_S)
    assert bench.engine.take() == [RecomputeSequence(seq_id, FIRST)]
    bench.allocate(seq_id)  # it crossed the command, and means nothing any more
    await asyncio.sleep(1)
    assert bench.reader.reads == []
    bench.sample(seq_id, 100, FinishReason.STOP)
    await settle()
    assert bench.frame().deltas[0].finish_reason == "stop"
    bench.assert_idle()


@virtual_time
async def test_owner_that_dies_while_a_request_is_queued_fails_it_when_the_policy_says_so() -> None:
    bench, seq_id = await bench_queued(OnKvFailure.FAIL)
    bench.owner.die()
    await asyncio.sleep(SILENCE_LIMIT_S + JUST_OVER_S)
    assert bench.engine.take() == [AbortSequence(seq_id)]
    error = bench.failure()
    assert isinstance(error, TransferFailed)
    assert error.retryable
    await asyncio.sleep(1)
    bench.assert_idle()


@virtual_time
async def test_owner_that_dies_before_the_prefill_is_done_leaves_it_to_the_router() -> None:
    """Without first tokens nothing can be recomputed; the router computes elsewhere, and aborts here."""
    bench, seq_id = await bench_queued(is_computing=True)
    bench.owner.die()
    await asyncio.sleep(10)
    assert bench.engine.take() == []
    assert not bench.frame().failures
    bench.abort()
    await asyncio.sleep(1)
    assert bench.engine.take() == [AbortSequence(seq_id)]
    bench.assert_idle()


# ---- fetching


@pytest.mark.parametrize("status", [FetchStatus.DONE, FetchStatus.FAILED])
def test_aborted_fetch_keeps_its_blocks_until_the_read_has_ended(status: FetchStatus) -> None:
    """A block that is freed while a read lands in it gives the next request foreign KV."""

    @virtual_time
    async def run() -> None:
        bench, seq_id = await bench_in_fetch()
        bench.abort()
        await asyncio.sleep(20)
        assert bench.engine.take() == []
        assert "release" not in bench.owner.calls
        bench.reader.end(status)
        await settle()
        assert bench.engine.take() == [AbortSequence(seq_id)]
        assert bench.owner.calls[-1] == "release"
        assert not bench.frame().failures
        bench.assert_idle()

    run()


@virtual_time
async def test_abort_between_two_reads_frees_everything_at_once() -> None:
    bench = DecodeBench()
    bench.submit_early(tokens_ready=4)
    seq_id = await bench.until_fetching()
    bench.reader.end()
    await settle()
    bench.abort()
    await settle()
    assert bench.engine.take() == [AbortSequence(seq_id)]
    assert bench.owner.calls == ["connect", "release"]
    bench.assert_idle()


@virtual_time
async def test_session_that_ends_during_a_read_frees_its_blocks_later_and_leaves_the_ticket() -> None:
    bench, seq_id = await bench_in_fetch()
    bench.session.end()
    await settle()
    assert bench.engine.take() == []
    assert bench.owner.num_waiting == 0
    bench.reader.end()
    await settle()
    assert bench.engine.take() == [AbortSequence(seq_id)]
    assert bench.owner.calls == ["connect"]
    bench.assert_idle()


@virtual_time
async def test_owner_that_dies_fails_the_read_and_so_the_prompt_is_recomputed() -> None:
    bench, seq_id = await bench_in_fetch()
    bench.owner.die()
    bench.reader.end(FetchStatus.FAILED)
    await asyncio.sleep(1)
    assert bench.engine.take() == [RecomputeSequence(seq_id, FIRST)]
    bench.abort()
    assert bench.engine.take() == [AbortSequence(seq_id)]
    bench.assert_idle()


@pytest.mark.parametrize("policy", OnKvFailure)
def test_request_whose_owner_went_silent_fails_though_its_read_hangs(policy: OnKvFailure) -> None:
    """A cut network: the transport reports nothing. The request goes elsewhere, its blocks wait."""

    @virtual_time
    async def run() -> None:
        bench, seq_id = await bench_in_fetch(policy)
        bench.owner.hang()
        await asyncio.sleep(5)
        error = bench.failure()
        assert isinstance(error, TransferFailed)
        assert error.retryable
        assert len(bench.session) == 0
        assert bench.engine.take() == []
        await asyncio.sleep(10)
        bench.reader.end(FetchStatus.FAILED)
        bench.owner.die()
        bench.owner.answers.set()
        await asyncio.sleep(1)
        assert bench.engine.take() == [AbortSequence(seq_id)]
        assert bench.health.fault is None
        bench.assert_idle()

    run()


@pytest.mark.parametrize("policy", OnKvFailure)
def test_request_does_not_wait_for_a_read_that_hangs_though_its_owner_lives(policy: OnKvFailure) -> None:
    @virtual_time
    async def run() -> None:
        bench, seq_id = await bench_in_fetch(policy)
        await asyncio.sleep(9.9)
        assert not bench.frame().failures
        await asyncio.sleep(0.2)
        error = bench.failure()
        assert isinstance(error, TransferTimeout)
        assert error.retryable
        assert bench.engine.take() == []
        bench.reader.end()
        await settle()
        assert bench.engine.take() == [AbortSequence(seq_id)]
        assert bench.owner.calls == ["connect", "release"]
        bench.assert_idle()

    run()


@virtual_time
async def test_request_with_little_time_waits_for_its_read_only_a_part_of_it() -> None:
    bench = DecodeBench()
    bench.submit(make_request(deadline_s=6.0))
    await bench.until_fetching()
    await asyncio.sleep(2.1)
    assert isinstance(bench.failure(), TransferTimeout)
    bench.reader.end()
    await settle()
    bench.assert_idle()


@pytest.mark.parametrize("is_aborted", [False, True])
def test_read_that_never_ends_poisons_the_worker_and_keeps_the_blocks(is_aborted: bool) -> None:
    @virtual_time
    async def run() -> None:
        bench, _ = await bench_in_fetch()
        if is_aborted:
            bench.abort()
        await asyncio.sleep(29)
        assert len(bench.session) == 0
        assert bench.health.fault is None
        assert bool(bench.frame().failures) is not is_aborted
        await asyncio.sleep(2)
        assert bench.engine.take() == []
        with pytest.raises(EngineFault, match="has not ended in 30 s"):
            bench.health.check()
        assert bench.reader.connected == ["agent-p-first"]
        await bench.peers.close()
        assert bench.reader.connected == ["agent-p-first"]
        bench.assert_idle()

    run()


@virtual_time
async def test_read_whose_start_hangs_poisons_the_worker_and_keeps_the_blocks() -> None:
    bench = DecodeBench()
    with bench.peers.use(P0, "10.0.0.1:5") as peer:
        await peer.connect()
    bench.reader.works.clear()
    bench.submit()
    await settle()
    bench.allocate(bench.reserved())
    await asyncio.sleep(31)
    assert isinstance(bench.failure(), TransferTimeout)
    assert bench.engine.take() == []
    with pytest.raises(EngineFault):
        bench.health.check()
    bench.assert_idle()


@virtual_time
async def test_owner_whose_read_hangs_is_not_forgotten_while_others_come_and_go() -> None:
    bench, _ = await bench_in_fetch()
    bench.abort()
    await asyncio.sleep(20)
    await bench.peers.refresh([])
    assert bench.reader.connected == ["agent-p-first"]
    bench.reader.end()
    await settle()
    await asyncio.sleep(11)
    await bench.peers.refresh([])
    assert bench.reader.connected == []
    bench.assert_idle()


# ---- validating


@pytest.mark.parametrize("policy", OnKvFailure)
def test_owner_that_goes_silent_with_its_verdict_is_waited_for_only_a_few_seconds(
    policy: OnKvFailure,
) -> None:
    @virtual_time
    async def run() -> None:
        bench, seq_id = await bench_in_fetch(policy)
        bench.owner.hang()
        bench.reader.end()
        await asyncio.sleep(3)
        assert bench.engine.take() == []
        await asyncio.sleep(2)
        if policy is OnKvFailure.RECOMPUTE:
            assert bench.engine.take() == [RecomputeSequence(seq_id, FIRST)]
            bench.session.end()
        else:
            assert bench.engine.take() == [AbortSequence(seq_id)]
            assert isinstance(bench.failure(), TransferFailed)
        bench.owner.answers.set()
        await settle()
        bench.assert_idle()

    run()


@virtual_time
async def test_verdict_that_comes_just_after_the_end_of_the_lease_that_it_caused_counts() -> None:
    bench, seq_id = await bench_in_fetch()
    bench.owner.judges.clear()
    bench.reader.end()
    await settle()
    bench.owner.lose()
    await asyncio.sleep(0.25)
    assert bench.engine.take() == []
    bench.owner.judges.set()
    await settle()
    assert bench.engine.take() == [AdmitSequence(seq_id, FIRST)]
    assert bench.owner.calls == ["connect", "release"]
    bench.session.end()
    bench.assert_idle()


@virtual_time
async def test_abort_while_the_owner_is_asked_for_its_verdict_frees_the_blocks_at_once() -> None:
    bench, seq_id = await bench_in_fetch()
    bench.owner.judges.clear()
    bench.reader.end()
    await settle()
    bench.abort()
    await settle()
    assert bench.engine.take() == [AbortSequence(seq_id)]
    bench.owner.judges.set()
    await settle()
    assert bench.owner.calls == ["connect", "release", "release"]
    assert len(set(bench.owner.readers)) == 1
    bench.assert_idle()


# ---- waiting for the beginning


@virtual_time
async def test_abort_after_the_verdict_frees_the_blocks_and_gives_nothing_back_twice() -> None:
    bench = DecodeBench()
    bench.submit_early(tokens_ready=10)
    seq_id = await bench.until_fetching()
    bench.reader.end()
    await settle()
    assert bench.owner.calls == ["connect", "release"]
    bench.abort()
    await settle()
    assert bench.engine.take() == [AbortSequence(seq_id)]
    assert bench.owner.calls == ["connect", "release"]
    bench.assert_idle()


@virtual_time
async def test_owner_that_dies_after_the_verdict_has_no_effect() -> None:
    bench = DecodeBench()
    bench.submit_early(tokens_ready=10)
    seq_id = await bench.until_fetching()
    bench.reader.end()
    await settle()
    bench.owner.die()
    await asyncio.sleep(30)
    bench.begin()
    await settle()
    assert bench.engine.take() == [AdmitSequence(seq_id, FIRST)]
    bench.session.end()
    bench.assert_idle()


# ---- decoding


@virtual_time
async def test_abort_while_decoding_frees_at_the_next_step() -> None:
    bench, seq_id = await bench_decoding()
    bench.abort()
    assert bench.engine.take() == [AbortSequence(seq_id)]
    bench.sample(seq_id, 101)
    await settle()
    assert not bench.frame().deltas
    bench.assert_idle()


@virtual_time
async def test_owner_that_dies_while_decoding_has_no_effect() -> None:
    bench, seq_id = await bench_decoding()
    bench.owner.die()
    await asyncio.sleep(30)
    bench.sample(seq_id, 101, FinishReason.STOP)
    await settle()
    frame = bench.frame()
    assert [delta.finish_reason for delta in frame.deltas] == ["stop"]
    assert not frame.failures
    assert bench.engine.take() == []
    bench.assert_idle()


@virtual_time
async def test_session_that_ends_frees_what_decodes() -> None:
    bench, seq_id = await bench_decoding()
    bench.session.end()
    bench.session.end()
    assert bench.engine.take() == [AbortSequence(seq_id)]
    assert bench.owner.calls == []
    bench.assert_idle()


@virtual_time
async def test_engine_that_fails_a_decoding_sequence_fails_its_request() -> None:
    bench, seq_id = await bench_decoding()
    bench.engine.emit(SequenceFailed(seq_id, EngineFault("broken")))
    await settle()
    assert isinstance(bench.failure(), EngineFault)
    bench.assert_idle()


# ---- deadlines and faults, in whatever state


@virtual_time
async def test_deadline_is_told_at_once_though_a_read_still_runs() -> None:
    bench = DecodeBench()
    bench.submit_early(make_request(deadline_s=3.0), tokens_ready=4)
    seq_id = await bench.until_fetching()
    bench.reader.end()
    await asyncio.sleep(2.5)
    bench.owner.compute(10)
    await asyncio.sleep(0.51)
    assert bench.reader.num_pending == 1
    assert isinstance(bench.failure(), DeadlineExceeded)
    assert bench.engine.take() == []
    bench.reader.end()
    await settle()
    assert bench.engine.take() == [AbortSequence(seq_id)]
    assert bench.owner.calls == ["connect", "release"]
    bench.assert_idle()


@virtual_time
async def test_deadline_ends_a_request_whose_prefill_never_ends() -> None:
    bench = DecodeBench()
    bench.submit_early(make_request(deadline_s=5.0))
    await settle()
    seq_id = bench.reserved()
    await asyncio.sleep(5.1)
    assert isinstance(bench.failure(), DeadlineExceeded)
    assert bench.engine.take() == [AbortSequence(seq_id)]
    assert bench.owner.calls == ["release"]
    bench.assert_idle()


@virtual_time
async def test_deadline_ends_a_decoding_request() -> None:
    bench = DecodeBench()
    bench.submit(make_request(deadline_s=5.0))
    seq_id = await bench.until_fetching()
    bench.reader.end()
    await settle()
    bench.engine.take()
    await asyncio.sleep(5.1)
    assert isinstance(bench.failure(), DeadlineExceeded)
    assert bench.engine.take() == [AbortSequence(seq_id)]
    bench.assert_idle()


@virtual_time
async def test_session_end_drops_every_request_in_whatever_state() -> None:
    bench, fetching = await bench_in_fetch()
    bench.submit(make_request("queued"))
    await settle()
    queued = bench.reserved()
    bench.session.end()
    await settle()
    assert bench.engine.take() == [AbortSequence(queued)]
    bench.reader.end()
    await settle()
    assert bench.engine.take() == [AbortSequence(fetching)]
    bench.assert_idle()


@virtual_time
async def test_fault_fails_all_requests_of_the_session_and_leaves_their_tickets() -> None:
    bench, _ = await bench_in_fetch()
    bench.health.on_fault(bench.session.fail_all)
    bench.engine.fault = EngineFault("broken")
    bench.link.check()
    assert isinstance(bench.failure(), EngineFault)
    bench.reader.end()
    await settle()
    assert bench.owner.calls == ["connect"]
    bench.assert_idle()
