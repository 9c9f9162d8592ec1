"""A ticket's way to admission when its prefill is done, and what becomes of KV that is void.

Virtual time; each test ends with a leak check.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from decode_fakes import BLOCK_BYTES, DecodeBench, make_ticket
from virtual_time import settle, virtual_time
from worker_fakes import D0, make_request

from decode_worker import OnKvFailure
from engine import AbortSequence, AdmitSequence, RecomputeSequence, ReserveSequence, SequenceFailed
from protocol.errors import (
    InvalidRequest,
    LayoutMismatch,
    LeaseExpired,
    Overloaded,
    TransferFailed,
    WorkerUnavailable,
)
from protocol.generation import FinishReason
from protocol.handoff import Verdict
from protocol.ids import SequenceId
from protocol.ports import FetchStatus

FIRST = ((0, 77),)


async def bench_in_fetch(policy: OnKvFailure = OnKvFailure.RECOMPUTE) -> tuple[DecodeBench, SequenceId]:
    """A session whose only request is in the middle of its read."""
    bench = DecodeBench(policy)
    bench.submit()
    return bench, await bench.until_fetching()


@virtual_time
async def test_valid_ticket_is_read_validated_and_admitted() -> None:
    bench = DecodeBench()
    request = make_request(outputs=(5, 6))
    bench.submit(replace(request, sampling=replace(request.sampling, prompt_logprobs=2)))
    await settle()
    (reserve,) = bench.engine.take()
    assert reserve == ReserveSequence(
        reserve.seq_id, request.prompt_token_ids, request.sampling, request.output_token_ids
    )
    assert bench.owner.calls == []
    await asyncio.sleep(0.5)
    bench.allocate(reserve.seq_id, (41, 42, 43, 44))
    await settle()
    assert bench.reader.reads == [("agent-p-first", (7, 8, 9), (41, 42, 43))]
    assert bench.engine.take() == []
    await asyncio.sleep(0.25)
    bench.reader.end()
    await settle()
    assert bench.owner.calls == ["connect", "release"]
    assert bench.engine.take() == [AdmitSequence(reserve.seq_id, FIRST)]
    bench.sample(reserve.seq_id, 100)
    bench.sample(reserve.seq_id, 101, FinishReason.STOP)
    await settle()
    first, last = bench.frame().deltas
    assert ([t.token_id for t in first.tokens], first.finish_reason) == ([100], "")
    assert first.receipt.decode_queue_s == pytest.approx(0.5)
    assert first.receipt.fetch_s == pytest.approx(0.25)
    assert first.receipt.fetched_bytes == 3 * BLOCK_BYTES
    assert ([t.token_id for t in last.tokens], last.finish_reason) == ([101], "stop")
    assert not last.HasField("receipt")
    assert bench.engine.take() == []
    bench.assert_idle()


@virtual_time
async def test_only_blocks_that_the_local_cache_lacks_are_read() -> None:
    bench = DecodeBench()
    bench.submit()
    await settle()
    seq_id = bench.reserved()
    bench.allocate(seq_id, (41, 42, 43), num_cached=8)
    await settle()
    assert bench.reader.reads == [("agent-p-first", (9,), (43,))]
    bench.reader.end()
    await settle()
    assert bench.engine.take() == [AdmitSequence(seq_id, FIRST)]
    bench.abort()
    await settle()
    bench.assert_idle()


@virtual_time
async def test_fully_cached_prompt_needs_no_read_but_gives_the_ticket_back() -> None:
    bench = DecodeBench()
    bench.owner.verdict = Verdict.EXPIRED
    bench.submit(make_request(num_prompt=8))
    await settle()
    seq_id = bench.reserved()
    bench.allocate(seq_id, (41, 42), num_cached=8)
    await settle()
    assert bench.reader.reads == []
    assert bench.owner.calls == ["release"]
    assert bench.engine.take() == [AdmitSequence(seq_id, FIRST)]
    bench.abort()
    bench.assert_idle()


@virtual_time
async def test_each_intake_is_a_reader_of_its_own() -> None:
    bench = DecodeBench()
    for name in "ab":
        bench.submit(make_request(name))
        await settle()
        bench.allocate(bench.reserved())
        await settle()
        bench.reader.end()
        await settle()
        bench.engine.take()
    first, second = bench.owner.readers
    assert first != second
    assert len(first) == len(second) == 32
    bench.session.end()
    bench.assert_idle()


VOID = [Verdict.EXPIRED, Verdict.UNKNOWN]


@pytest.mark.parametrize("verdict", VOID)
def test_kv_that_is_not_valid_is_recomputed(verdict: Verdict) -> None:
    @virtual_time
    async def run() -> None:
        bench, seq_id = await bench_in_fetch()
        bench.owner.verdict = verdict
        bench.reader.end()
        await settle()
        assert bench.engine.take() == [RecomputeSequence(seq_id, FIRST)]
        bench.sample(seq_id, 100, FinishReason.LENGTH)
        await settle()
        assert bench.frame().deltas[0].finish_reason == "length"
        assert bench.owner.calls.count("release") == 1
        bench.assert_idle()

    run()


@pytest.mark.parametrize("verdict", VOID)
def test_kv_that_is_not_valid_fails_the_request_when_the_policy_says_so(verdict: Verdict) -> None:
    @virtual_time
    async def run() -> None:
        bench, seq_id = await bench_in_fetch(OnKvFailure.FAIL)
        bench.owner.verdict = verdict
        bench.reader.end()
        await settle()
        assert bench.engine.take() == [AbortSequence(seq_id)]
        error = bench.failure()
        assert isinstance(error, LeaseExpired)
        assert verdict.value in error.message
        bench.assert_idle()

    run()


async def fail_read(bench: DecodeBench) -> None:
    bench.reader.end(FetchStatus.FAILED)


async def silence_owner(bench: DecodeBench) -> None:
    bench.owner.release_fails_with = WorkerUnavailable("gone")
    bench.reader.end()
    await asyncio.sleep(1)


@pytest.mark.parametrize("break_it", [fail_read, silence_owner])
@pytest.mark.parametrize("policy", OnKvFailure)
def test_failed_take_over_follows_the_policy(
    policy: OnKvFailure, break_it: Callable[[DecodeBench], Coroutine[Any, Any, None]]
) -> None:
    @virtual_time
    async def run() -> None:
        bench, seq_id = await bench_in_fetch(policy)
        await break_it(bench)
        await asyncio.sleep(1)
        if policy is OnKvFailure.RECOMPUTE:
            assert bench.engine.take() == [RecomputeSequence(seq_id, FIRST)]
            bench.abort()
        else:
            assert bench.engine.take() == [AbortSequence(seq_id)]
            assert isinstance(bench.failure(), TransferFailed)
        assert "release" in bench.owner.calls
        bench.assert_idle()

    run()


@virtual_time
async def test_owner_is_asked_for_its_verdict_again_by_the_same_reader() -> None:
    bench, seq_id = await bench_in_fetch()
    bench.owner.release_fails_with = WorkerUnavailable("one call is lost")
    bench.reader.end()
    await settle()
    bench.owner.release_fails_with = None
    await asyncio.sleep(1)
    assert bench.engine.take() == [AdmitSequence(seq_id, FIRST)]
    assert len(bench.owner.readers) == 2
    assert len(set(bench.owner.readers)) == 1
    bench.session.end()
    bench.assert_idle()


@pytest.mark.parametrize("policy", OnKvFailure)
def test_read_that_cannot_be_started_follows_the_policy_and_gives_the_ticket_back(
    policy: OnKvFailure,
) -> None:
    @virtual_time
    async def run() -> None:
        bench = DecodeBench(policy)
        bench.reader.refuses = True
        bench.submit()
        await settle()
        seq_id = bench.reserved()
        bench.allocate(seq_id)
        await settle()
        command = (
            RecomputeSequence(seq_id, FIRST) if policy is OnKvFailure.RECOMPUTE else AbortSequence(seq_id)
        )
        assert bench.engine.take() == [command]
        assert bench.owner.calls == ["connect", "release"]
        bench.session.end()
        bench.assert_idle()

    run()


@virtual_time
async def test_unreachable_owner_means_recompute() -> None:
    bench = DecodeBench()
    bench.owner.die()
    bench.submit()
    await settle()
    seq_id = bench.reserved()
    bench.allocate(seq_id)
    await asyncio.sleep(1)
    assert bench.engine.take() == [RecomputeSequence(seq_id, FIRST)]
    bench.abort()
    bench.assert_idle()


async def bench_in_handshake() -> tuple[DecodeBench, SequenceId]:
    """A session whose only request has its blocks and waits for an owner that does not greet."""
    bench = DecodeBench()
    bench.owner.greets.clear()
    bench.submit()
    await settle()
    seq_id = bench.reserved()
    bench.allocate(seq_id)
    await settle()
    assert bench.owner.calls == ["connect"]
    return bench, seq_id


@virtual_time
async def test_dropped_intake_does_not_wait_for_the_handshake() -> None:
    bench, seq_id = await bench_in_handshake()
    bench.abort()
    await settle()
    assert bench.engine.take() == [AbortSequence(seq_id)]
    bench.assert_idle()
    await bench.peers.close()


@virtual_time
async def test_lease_lost_during_the_handshake_recomputes_at_once() -> None:
    bench, seq_id = await bench_in_handshake()
    bench.owner.lose()
    await settle()
    assert bench.engine.take() == [RecomputeSequence(seq_id, FIRST)]
    bench.abort()
    await settle()
    bench.assert_idle()
    await bench.peers.close()


@virtual_time
async def test_intakes_of_an_owner_that_does_not_greet_wait_for_one_time_limit_together() -> None:
    bench = DecodeBench()
    bench.owner.greets.clear()
    for name in "abc":
        bench.submit(make_request(name))
    await settle()
    for reserve in bench.engine.take():
        assert isinstance(reserve, ReserveSequence)
        bench.allocate(reserve.seq_id)
    await asyncio.sleep(10.1)
    assert [type(command) for command in bench.engine.take()] == [RecomputeSequence] * 3
    bench.session.end()
    await settle()
    bench.assert_idle()


@virtual_time
async def test_owner_that_restarted_is_another_owner() -> None:
    bench = DecodeBench(OnKvFailure.FAIL)
    bench.owner.identity = D0
    bench.submit()
    await settle()
    bench.allocate(bench.reserved())
    await settle()
    assert "d0@d-first" in bench.failure().message
    assert bench.reader.connected == []
    bench.assert_idle()


@pytest.mark.parametrize("policy", OnKvFailure)
def test_layout_mismatch_fails_whatever_the_policy(policy: OnKvFailure) -> None:
    @virtual_time
    async def run() -> None:
        bench = DecodeBench(policy)
        bench.owner.fingerprint = type(bench.owner.fingerprint)("m", "r2", "float32", "float32", 2, 2, 8, 4)
        bench.submit()
        await settle()
        seq_id = bench.reserved()
        bench.allocate(seq_id)
        await settle()
        error = bench.failure()
        assert isinstance(error, LayoutMismatch)
        assert "'r1' here" in error.message
        assert "'r2' there" in error.message
        assert bench.engine.take() == [AbortSequence(seq_id)]
        assert bench.owner.calls == ["connect", "release"]
        bench.assert_idle()

    run()


@virtual_time
async def test_layout_mismatch_is_told_also_where_the_owner_has_other_blocks() -> None:
    """Until it is connected its block size is unknown, and the ticket cannot be blamed for it."""
    bench = DecodeBench()
    bench.owner.fingerprint = type(bench.owner.fingerprint)("m", "r2", "float32", "float32", 2, 2, 8, 8)
    bench.submit(make_request(), make_ticket(make_request(), block_ids=(7, 8)))
    await settle()
    bench.allocate(bench.reserved())
    await settle()
    assert isinstance(bench.failure(), LayoutMismatch)
    bench.engine.take()
    bench.assert_idle()


@virtual_time
async def test_engine_that_refuses_the_sequence_gives_the_ticket_back() -> None:
    bench = DecodeBench()
    bench.submit()
    await settle()
    seq_id = bench.reserved()
    bench.engine.emit(SequenceFailed(seq_id, Overloaded("full", retry_after_s=2.0)))
    await settle()
    error = bench.failure()
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 2.0
    assert bench.owner.calls == ["release"]
    bench.assert_idle()


@virtual_time
async def test_engine_that_has_just_ended_fails_the_request_and_leaves_the_ticket_to_another() -> None:
    bench = DecodeBench()
    bench.engine.refuses_with = WorkerUnavailable("the engine has stopped")
    bench.submit()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    bench.engine.refuses_with = None
    await settle()
    assert isinstance(bench.failure(), WorkerUnavailable)
    assert bench.owner.calls == []
    bench.assert_idle()


CHECKSUMS = (70, 80, 90)


@virtual_time
async def test_blocks_whose_checksums_agree_are_admitted_and_cached_ones_are_not_compared() -> None:
    bench = DecodeBench()
    bench.owner.checksums = CHECKSUMS
    bench.submit()
    await settle()
    seq_id = bench.reserved()
    bench.allocate(seq_id, (41, 42, 43), num_cached=4)
    await settle()
    bench.reader.end(checksums={1: 80, 2: 90})
    await settle()
    assert bench.engine.take() == [AdmitSequence(seq_id, FIRST)]
    bench.session.end()
    bench.assert_idle()


@pytest.mark.parametrize("checksums", [(70, 81, 90), (), (70, 80)])
@pytest.mark.parametrize("policy", OnKvFailure)
def test_flipped_bit_or_missing_checksum_voids_the_kv(
    policy: OnKvFailure, checksums: tuple[int, ...]
) -> None:
    @virtual_time
    async def run() -> None:
        bench = DecodeBench(policy)
        bench.owner.checksums = checksums
        bench.submit()
        seq_id = await bench.until_fetching()
        bench.reader.end(checksums=dict(enumerate(CHECKSUMS)))
        await settle()
        if policy is OnKvFailure.RECOMPUTE:
            assert bench.engine.take() == [RecomputeSequence(seq_id, FIRST)]
        else:
            assert bench.engine.take() == [AbortSequence(seq_id)]
            error = bench.failure()
            assert isinstance(error, TransferFailed)
            assert "checksum" in error.message
        assert bench.owner.calls.count("release") == 1
        bench.session.end()
        bench.assert_idle()

    run()


@virtual_time
async def test_owner_that_computes_no_checksums_is_no_match_for_a_reader_that_wants_them() -> None:
    bench = DecodeBench()
    bench.owner.release_fails_with = LayoutMismatch("set kv_transfer.checksum alike on all workers")
    bench.submit()
    seq_id = await bench.until_fetching()
    bench.reader.end(checksums=dict(enumerate(CHECKSUMS)))
    await settle()
    assert isinstance(bench.failure(), LayoutMismatch)
    assert bench.engine.take() == [AbortSequence(seq_id)]
    bench.assert_idle()


@virtual_time
async def test_ticket_that_names_too_few_blocks_is_not_read() -> None:
    bench = DecodeBench(OnKvFailure.FAIL)
    bench.submit(make_request(), make_ticket(make_request(), block_ids=(7, 8)))
    await settle()
    seq_id = bench.reserved()
    bench.allocate(seq_id)
    await settle()
    error = bench.failure()
    assert isinstance(error, TransferFailed)
    assert "names 2 blocks, not 3" in error.message
    assert bench.engine.take() == [AbortSequence(seq_id)]
    assert bench.owner.calls == ["connect", "release"]
    bench.assert_idle()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_tokens": 9}, "covers 9 tokens"),
        ({"tokens_ready": 11}, "11 of the ticket's 10"),
        ({"lease_s": 0.0}, "lease is 0.0 s"),
    ],
)
def test_ticket_that_does_not_fit_the_request_is_refused(changes: dict[str, object], words: str) -> None:
    @virtual_time
    async def run() -> None:
        bench = DecodeBench()
        request = make_request()
        bench.submit(request, make_ticket(request, **changes))
        await settle()
        error = bench.failure()
        assert isinstance(error, InvalidRequest)
        assert words in error.message
        assert bench.engine.take() == []
        assert bench.owner.calls == ["release"]
        bench.assert_idle()

    run()
