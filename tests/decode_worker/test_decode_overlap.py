"""A ticket whose prefill still runs: late reservation, reads chunk by chunk, and the beginning."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from decode_fakes import FIRST_TOKEN, DecodeBench, make_ticket
from virtual_time import settle, virtual_time
from worker_fakes import BLOCK_SIZE, FINGERPRINT, P0, make_request

from decode_worker import OnKvFailure
from decode_worker.reservation import DOUBT, MARGIN_S
from engine import AbortSequence, AdmitSequence, RecomputeSequence, ReserveSequence
from protocol.errors import InvalidRequest, LeaseExpired, TransferFailed
from protocol.generation import FinishReason
from protocol.ids import SequenceId
from protocol.ports import FetchStatus

FIRST = ((0, 77),)
OWNER = (P0, "10.0.0.1:5")
BLOCKS = (41, 42, 43)


async def bench_reading(tokens_ready: int) -> tuple[DecodeBench, SequenceId]:
    """A request of 10 tokens (blocks of 4) with its blocks, whose prefill has got so far."""
    bench = DecodeBench()
    bench.submit_early(tokens_ready=tokens_ready)
    await settle()
    seq_id = bench.reserved()
    bench.allocate(seq_id)
    await settle()
    return bench, seq_id


def reads(bench: DecodeBench) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(remote, local) for _, remote, local in bench.reader.reads]


@virtual_time
async def test_finished_chunks_are_read_while_the_owner_computes_the_next() -> None:
    bench, seq_id = await bench_reading(0)
    assert reads(bench) == []
    bench.owner.compute(4)
    await settle()
    assert reads(bench) == [((7,), (41,))]
    bench.reader.end()
    await settle()
    assert len(bench.reader.reads) == 1
    bench.owner.compute(9)
    await settle()
    assert reads(bench)[1:] == [((8,), (42,))]
    bench.reader.end()
    await settle()
    assert "release" not in bench.owner.calls
    bench.owner.compute(10)
    await settle()
    assert reads(bench)[2:] == [((9,), (43,))]
    bench.reader.end()
    await settle()
    assert bench.owner.calls == ["connect", "release"]
    assert bench.engine.take() == []
    bench.begin()
    await settle()
    assert bench.engine.take() == [AdmitSequence(seq_id, FIRST)]
    bench.session.end()
    bench.assert_idle()


@virtual_time
async def test_one_read_at_a_time_and_the_next_takes_all_that_is_ready() -> None:
    bench, _ = await bench_reading(4)
    assert reads(bench) == [((7,), (41,))]
    bench.owner.compute(8)
    await settle()
    bench.owner.compute(10)
    await settle()
    assert len(bench.reader.reads) == 1
    bench.reader.end()
    await settle()
    assert reads(bench)[1:] == [((8, 9), (42, 43))]
    bench.session.end()
    bench.reader.end()
    await settle()
    bench.assert_idle()


@virtual_time
async def test_partly_filled_block_is_read_only_when_it_is_whole_or_the_last() -> None:
    bench, _ = await bench_reading(7)
    assert reads(bench) == [((7,), (41,))]
    bench.session.end()
    bench.reader.end()
    await settle()
    bench.assert_idle()


@pytest.mark.parametrize("begins_first", [False, True])
def test_admission_needs_both_the_verdict_and_the_beginning(begins_first: bool) -> None:
    @virtual_time
    async def run() -> None:
        bench, seq_id = await bench_reading(10)
        if begins_first:
            bench.begin()
            await settle()
        assert bench.engine.take() == []
        bench.reader.end()
        await settle()
        assert bench.owner.calls[-1] == "release"
        if not begins_first:
            assert bench.engine.take() == []
            bench.begin()
            await settle()
        assert bench.engine.take() == [AdmitSequence(seq_id, FIRST)]
        bench.session.end()
        bench.assert_idle()

    run()


@virtual_time
async def test_receipt_tells_only_what_the_prefill_did_not_hide() -> None:
    bench, seq_id = await bench_reading(8)
    await asyncio.sleep(2)
    bench.reader.end()
    await asyncio.sleep(3)
    bench.owner.compute(10)
    await settle()
    await asyncio.sleep(0.125)
    bench.reader.end()
    bench.begin()
    await settle()
    bench.sample(seq_id, 100, FinishReason.STOP)
    await settle()
    (delta,) = bench.frame().deltas
    assert delta.receipt.fetch_s == pytest.approx(0.125)
    bench.assert_idle()


@virtual_time
async def test_nothing_measured_yet_means_to_reserve_at_once() -> None:
    bench = DecodeBench()
    bench.submit_early()
    await settle()
    assert isinstance(bench.engine.take()[0], ReserveSequence)
    bench.session.end()
    await settle()
    bench.assert_idle()


def bench_with_rates(tokens_per_s: float = 1.0, reads_per_s: float = 20.0) -> DecodeBench:
    bench = DecodeBench()
    with bench.peers.use(*OWNER) as peer:
        peer.prefill_rate.observe(tokens_per_s, 1.0)
        peer.read_rate.observe(reads_per_s, 1.0)
    return bench


@virtual_time
async def test_blocks_are_reserved_only_when_the_prefill_is_nearly_done() -> None:
    """10 tokens at one a second or faster; less twice half a second for reading them, and the margin."""
    bench = bench_with_rates()
    bench.submit_early()
    await asyncio.sleep(10 * (1 - DOUBT) - 2 * 0.5 - MARGIN_S - 0.01)
    assert bench.engine.take() == []
    await asyncio.sleep(0.02)
    assert isinstance(bench.engine.take()[0], ReserveSequence)
    bench.session.end()
    await settle()
    bench.assert_idle()


@virtual_time
async def test_prefill_that_is_quicker_than_expected_is_met_by_its_progress() -> None:
    bench = bench_with_rates()
    bench.submit_early()
    await asyncio.sleep(1)
    bench.owner.compute(4)
    await settle()
    assert bench.engine.take() == []
    bench.owner.compute(10)
    await settle()
    assert isinstance(bench.engine.take()[0], ReserveSequence)
    bench.session.end()
    await settle()
    bench.assert_idle()


@virtual_time
async def test_rates_are_learnt_from_prefills_and_reads() -> None:
    bench, _ = await bench_reading(0)
    for tokens_ready in (4, 8):
        await asyncio.sleep(2)
        bench.owner.compute(tokens_ready)
        await settle()
        await asyncio.sleep(0.5)
        bench.reader.end()
        await settle()
    with bench.peers.use(*OWNER) as peer:
        assert peer.prefill_rate.per_s == pytest.approx(1.75, rel=0.1)
        assert peer.read_rate.per_s == pytest.approx(8.0)
    bench.session.end()
    await settle()
    bench.assert_idle()


@virtual_time
async def test_request_that_waits_for_its_time_is_dropped_without_a_word_to_the_engine() -> None:
    bench = bench_with_rates(tokens_per_s=0.1)
    bench.submit_early()
    await settle()
    bench.abort()
    await settle()
    assert bench.engine.take() == []
    assert bench.owner.calls == ["release"]
    bench.assert_idle()


@virtual_time
async def test_ticket_of_a_running_prefill_is_not_given_back_though_all_of_it_is_cached() -> None:
    """It would end the prefill, and with it the first token."""
    bench = DecodeBench()
    bench.submit_early(make_request(num_prompt=8))
    await settle()
    seq_id = bench.reserved()
    bench.allocate(seq_id, (41, 42), num_cached=8)
    await asyncio.sleep(30)
    assert bench.owner.calls == []
    assert bench.owner.num_waiting == 1
    bench.owner.compute(8)
    bench.begin()
    await settle()
    assert bench.engine.take() == [AdmitSequence(seq_id, FIRST)]
    assert bench.owner.calls == ["release"]
    bench.session.end()
    await settle()
    bench.assert_idle()


@virtual_time
async def test_failed_read_waits_for_the_first_tokens_to_recompute_and_keeps_the_prefill_going() -> None:
    bench, seq_id = await bench_reading(4)
    bench.reader.end(FetchStatus.FAILED)
    await asyncio.sleep(5)
    assert bench.engine.take() == []
    assert bench.owner.calls == ["connect"]
    bench.owner.compute(10)
    bench.begin()
    await settle()
    assert bench.engine.take() == [RecomputeSequence(seq_id, FIRST)]
    assert bench.owner.calls == ["connect", "release"]
    bench.session.end()
    await settle()
    bench.assert_idle()


@virtual_time
async def test_lease_lost_before_blocks_were_asked_for_recomputes_when_it_begins() -> None:
    bench = bench_with_rates(tokens_per_s=0.1)
    bench.submit_early()
    await settle()
    bench.owner.lose()
    await settle()
    assert bench.engine.take() == []
    bench.begin()
    await settle()
    reserve, recompute = bench.engine.take()
    assert isinstance(reserve, ReserveSequence)
    assert recompute == RecomputeSequence(reserve.seq_id, FIRST)
    bench.session.end()
    await settle()
    bench.assert_idle()


@virtual_time
async def test_owner_that_stops_in_the_middle_fails_the_request_when_the_policy_says_so() -> None:
    bench = DecodeBench(OnKvFailure.FAIL)
    bench.submit_early(tokens_ready=4)
    seq_id = await bench.until_fetching()
    bench.reader.end()
    await settle()
    bench.owner.hang()
    await asyncio.sleep(5)
    assert isinstance(bench.failure(), TransferFailed)
    assert bench.engine.take() == [AbortSequence(seq_id)]
    await asyncio.sleep(60)
    bench.owner.answers.set()
    await settle()
    bench.assert_idle()


@pytest.mark.parametrize("begins_first", [False, True])
def test_beginning_tells_that_all_is_ready_though_the_owner_did_not_say_so_yet(begins_first: bool) -> None:
    @virtual_time
    async def run() -> None:
        bench = DecodeBench()
        with bench.peers.use(*OWNER) as peer:
            await peer.connect()
        bench.owner.hang()
        if begins_first:
            bench.submit_early()
            bench.begin()
        else:
            bench.submit_early()
            await settle()
            bench.begin()
        seq_id = await bench.until_fetching()
        assert reads(bench) == [((7, 8, 9), BLOCKS)]
        bench.owner.answers.set()
        bench.reader.end()
        await settle()
        assert bench.engine.take() == [AdmitSequence(seq_id, FIRST)]
        bench.session.end()
        bench.assert_idle()

    run()


@virtual_time
async def test_same_beginning_twice_is_one_and_another_one_is_refused() -> None:
    bench, seq_id = await bench_reading(10)
    bench.begin()
    bench.begin()
    assert not bench.frame().failures
    bench.begin({0: 78})
    assert isinstance(bench.failure(), InvalidRequest)
    bench.reader.end()
    await settle()
    assert bench.engine.take() == [AbortSequence(seq_id)]
    bench.assert_idle()


@virtual_time
async def test_beginning_of_a_request_that_is_gone_means_nothing() -> None:
    bench = DecodeBench()
    bench.begin(FIRST_TOKEN, "gone")
    await settle()
    assert not bench.frame().failures
    bench.assert_idle()


@virtual_time
async def test_lost_lease_lets_a_read_that_ends_soon_give_its_blocks_to_the_recomputing() -> None:
    bench, seq_id = await bench_reading(10)
    bench.begin()
    bench.owner.lose()
    await asyncio.sleep(0.1)
    assert bench.engine.take() == []
    bench.reader.end()
    await settle()
    assert bench.engine.take() == [RecomputeSequence(seq_id, FIRST)]
    assert not bench.frame().failures
    bench.session.end()
    await settle()
    bench.assert_idle()


@virtual_time
async def test_lost_lease_fails_a_request_whose_read_does_not_end_soon() -> None:
    bench, seq_id = await bench_reading(10)
    bench.begin()
    bench.owner.lose()
    await asyncio.sleep(0.5)
    assert isinstance(bench.failure(), LeaseExpired)
    assert bench.engine.take() == []
    bench.reader.end()
    await settle()
    assert bench.engine.take() == [AbortSequence(seq_id)]
    bench.assert_idle()


@virtual_time
async def test_owner_with_larger_blocks_is_read_in_its_blocks_from_where_the_own_cache_ends() -> None:
    bench = DecodeBench()
    bench.owner.fingerprint = replace(FINGERPRINT, block_size=2 * BLOCK_SIZE)
    bench.owner.compute(9)
    request = make_request(num_prompt=18)
    ticket = make_ticket(request, block_ids=(7, 8, 9), tokens_ready=9)
    bench.submit(request, ticket, None)
    await settle()
    seq_id = bench.reserved()
    bench.allocate(seq_id, (41, 42, 43, 44, 45), num_cached=BLOCK_SIZE)
    await settle()
    assert bench.reader.tokens == [range(4, 8)]
    bench.reader.end()
    bench.begin()
    await settle()
    assert bench.reader.tokens[1:] == [range(8, 18)]
    bench.reader.end()
    await settle()
    assert bench.engine.take() == [AdmitSequence(seq_id, FIRST)]
    bench.session.end()
    bench.assert_idle()
