"""A ticket's way to admission, and every way out of it. Virtual time; each test ends with a leak check."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from decode_fakes import BLOCK_BYTES, LEASE_S, DecodeBench, make_ticket
from virtual_time import settle, virtual_time
from worker_fakes import D0, P0, make_request

from decode_worker import OnKvFailure
from engine import (
    AbortSequence,
    AdmitSequence,
    RecomputeSequence,
    ReserveSequence,
    SequenceFailed,
)
from protocol.codec import failure_from_wire
from protocol.errors import (
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    LayoutMismatch,
    LeaseExpired,
    Overloaded,
    SplitserveError,
    TransferFailed,
    TransferTimeout,
    WorkerUnavailable,
)
from protocol.generation import FinishReason
from protocol.handoff import Verdict
from protocol.ids import SequenceId
from protocol.ports import FetchStatus


async def bench_in_fetch(policy: OnKvFailure = OnKvFailure.RECOMPUTE) -> tuple[DecodeBench, SequenceId]:
    """A session whose only request is in the middle of its read."""
    bench = DecodeBench(policy)
    bench.submit()
    await settle()
    seq_id = bench.reserved()
    bench.allocate(seq_id)
    await settle()
    assert len(bench.reader.reads) == 1
    return bench, seq_id


def failure(bench: DecodeBench) -> SplitserveError:
    (wire,) = bench.frame().failures
    assert wire.request_id == "r"
    return failure_from_wire(wire)


@virtual_time
async def test_valid_ticket_is_read_validated_and_admitted() -> None:
    bench = DecodeBench()
    bench.submit(make_request(outputs=(5, 6)))
    await settle()
    (reserve,) = bench.engine.take()
    assert isinstance(reserve, ReserveSequence)
    assert reserve.output_token_ids == (5, 6, 77)
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
    assert bench.engine.take() == [AdmitSequence(reserve.seq_id)]
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
    assert bench.engine.take() == [AdmitSequence(seq_id)]
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
    assert bench.engine.take() == [AdmitSequence(seq_id)]
    bench.abort()
    bench.assert_idle()


@virtual_time
async def test_lease_is_renewed_while_queued_and_while_fetching() -> None:
    bench = DecodeBench()
    bench.submit()
    await asyncio.sleep(2 * LEASE_S)
    queued = bench.owner.calls.count("renew")
    assert queued >= 6
    bench.allocate(bench.reserved())
    await asyncio.sleep(LEASE_S)
    assert bench.owner.calls.count("renew") >= queued + 3
    bench.reader.end()
    await settle()
    renewals = bench.owner.calls.count("renew")
    await asyncio.sleep(3 * LEASE_S)
    assert bench.owner.calls.count("renew") == renewals
    bench.abort()
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
        assert bench.engine.take() == [RecomputeSequence(seq_id)]
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
        error = failure(bench)
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
            assert bench.engine.take() == [RecomputeSequence(seq_id)]
            bench.abort()
        else:
            assert bench.engine.take() == [AbortSequence(seq_id)]
            assert isinstance(failure(bench), TransferFailed)
        assert "release" in bench.owner.calls
        bench.assert_idle()

    run()


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
        kind = RecomputeSequence if policy is OnKvFailure.RECOMPUTE else AbortSequence
        assert bench.engine.take() == [kind(seq_id)]
        assert bench.owner.calls == ["connect", "release"]
        bench.session.end()
        bench.assert_idle()

    run()


@virtual_time
async def test_unreachable_owner_means_recompute() -> None:
    bench = DecodeBench()
    bench.owner.fails_with = WorkerUnavailable("connection refused")
    bench.submit()
    await settle()
    seq_id = bench.reserved()
    bench.allocate(seq_id)
    await asyncio.sleep(1)
    assert bench.engine.take() == [RecomputeSequence(seq_id)]
    bench.abort()
    bench.assert_idle()


@virtual_time
async def test_owner_that_restarted_is_another_owner() -> None:
    bench = DecodeBench(OnKvFailure.FAIL)
    bench.owner.identity = D0
    bench.submit()
    await settle()
    bench.allocate(bench.reserved())
    await settle()
    assert "d0@d-first" in failure(bench).message
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
        error = failure(bench)
        assert isinstance(error, LayoutMismatch)
        assert "'r1' here" in error.message
        assert "'r2' there" in error.message
        assert bench.engine.take() == [AbortSequence(seq_id)]
        assert bench.owner.calls == ["connect", "release"]
        bench.assert_idle()

    run()


@virtual_time
async def test_lease_lost_in_the_queue_recomputes_once_there_are_blocks() -> None:
    bench = DecodeBench()
    bench.owner.is_held = False
    bench.submit()
    await asyncio.sleep(LEASE_S)
    seq_id = bench.reserved()
    await asyncio.sleep(60)
    assert bench.engine.take() == []
    bench.allocate(seq_id)
    await settle()
    assert bench.engine.take() == [RecomputeSequence(seq_id)]
    assert bench.reader.reads == []
    bench.abort()
    await settle()
    bench.assert_idle()


@virtual_time
async def test_lease_lost_in_the_queue_fails_at_once_when_the_policy_says_so() -> None:
    bench = DecodeBench(OnKvFailure.FAIL)
    bench.owner.is_held = False
    bench.submit()
    await settle()
    seq_id = bench.reserved()
    await asyncio.sleep(LEASE_S)
    assert bench.engine.take() == [AbortSequence(seq_id)]
    assert isinstance(failure(bench), LeaseExpired)
    bench.assert_idle()


@virtual_time
async def test_silent_owner_loses_the_lease_only_after_its_length() -> None:
    bench = DecodeBench(OnKvFailure.FAIL)
    bench.owner.fails_with = WorkerUnavailable("no route")
    bench.submit()
    await asyncio.sleep(LEASE_S * 0.9)
    assert not bench.frame().failures
    await asyncio.sleep(LEASE_S)
    assert isinstance(failure(bench), LeaseExpired)
    bench.assert_idle()


@virtual_time
async def test_abort_in_the_queue_frees_blocks_and_ticket() -> None:
    bench = DecodeBench()
    bench.submit()
    await settle()
    seq_id = bench.reserved()
    bench.abort()
    await settle()
    assert bench.engine.take() == [AbortSequence(seq_id)]
    assert bench.owner.calls == ["release"]
    assert not bench.frame().failures
    bench.assert_idle()


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
async def test_abort_while_decoding_frees_at_the_next_step() -> None:
    bench, seq_id = await bench_in_fetch()
    bench.reader.end()
    await settle()
    bench.sample(seq_id, 100)
    await settle()
    bench.engine.take()
    bench.frame()
    bench.abort()
    assert bench.engine.take() == [AbortSequence(seq_id)]
    bench.sample(seq_id, 101)
    await settle()
    assert not bench.frame().deltas
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
    assert bench.owner.calls.count("release") == 2
    bench.assert_idle()


@virtual_time
async def test_deadline_is_told_at_once_though_the_read_still_runs() -> None:
    bench = DecodeBench()
    bench.submit(make_request(deadline_s=2.0))
    await settle()
    seq_id = bench.reserved()
    bench.allocate(seq_id)
    await asyncio.sleep(2.1)
    assert isinstance(failure(bench), DeadlineExceeded)
    assert bench.engine.take() == []
    bench.reader.end()
    await settle()
    assert bench.engine.take() == [AbortSequence(seq_id)]
    bench.assert_idle()


@virtual_time
async def test_deadline_ends_a_decoding_request() -> None:
    bench = DecodeBench()
    bench.submit(make_request(deadline_s=5.0))
    await settle()
    seq_id = bench.reserved()
    bench.allocate(seq_id)
    await settle()
    bench.reader.end()
    await settle()
    bench.engine.take()
    await asyncio.sleep(5.1)
    assert isinstance(failure(bench), DeadlineExceeded)
    assert bench.engine.take() == [AbortSequence(seq_id)]
    bench.assert_idle()


@pytest.mark.parametrize("is_aborted", [False, True])
def test_read_that_never_ends_poisons_the_worker_and_keeps_the_blocks(is_aborted: bool) -> None:
    @virtual_time
    async def run() -> None:
        bench, _ = await bench_in_fetch()
        if is_aborted:
            bench.abort()
        await asyncio.sleep(31)
        assert bench.engine.take() == []
        if not is_aborted:
            assert isinstance(failure(bench), TransferTimeout)
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
    assert isinstance(failure(bench), TransferTimeout)
    assert bench.engine.take() == []
    with pytest.raises(EngineFault):
        bench.health.check()
    bench.assert_idle()


@virtual_time
async def test_engine_that_refuses_the_sequence_gives_the_ticket_back() -> None:
    bench = DecodeBench()
    bench.submit()
    await settle()
    seq_id = bench.reserved()
    bench.engine.emit(SequenceFailed(seq_id, Overloaded("full", retry_after_s=2.0)))
    await settle()
    error = failure(bench)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 2.0
    assert bench.owner.calls == ["release"]
    bench.assert_idle()


@virtual_time
async def test_engine_that_has_just_ended_fails_the_request() -> None:
    bench = DecodeBench()
    bench.engine.refuses_with = WorkerUnavailable("the engine has stopped")
    bench.submit()
    bench.engine.refuses_with = None
    await settle()
    bench.engine.take()
    bench.session.end()
    await settle()
    bench.assert_idle()


@virtual_time
async def test_refused_request_gives_the_ticket_back() -> None:
    bench = DecodeBench()
    bench.refusal = WorkerUnavailable("shutting down")
    bench.submit()
    await settle()
    assert isinstance(failure(bench), WorkerUnavailable)
    assert bench.owner.calls == ["release"]
    assert bench.engine.take() == []
    bench.assert_idle()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_tokens": 9}, "covers 9 tokens"),
        ({"tokens_ready": 4}, "only 4"),
        ({"block_ids": (7, 8)}, "names 2 blocks"),
    ],
)
def test_ticket_that_does_not_fit_the_request_is_refused(changes: dict[str, object], words: str) -> None:
    @virtual_time
    async def run() -> None:
        bench = DecodeBench()
        request = make_request()
        bench.submit(request, make_ticket(request, **changes))
        await settle()
        error = failure(bench)
        assert isinstance(error, InvalidRequest)
        assert words in error.message
        assert bench.engine.take() == []
        assert bench.owner.calls == ["release"]
        bench.assert_idle()

    run()


@virtual_time
async def test_second_request_with_the_same_id_is_refused_and_the_first_goes_on() -> None:
    bench, _ = await bench_in_fetch()
    bench.submit()
    await settle()
    assert isinstance(failure(bench), InvalidRequest)
    assert len(bench.session) == 1
    bench.session.end()
    bench.reader.end()
    await settle()
    bench.assert_idle()


@virtual_time
async def test_fault_fails_all_requests_of_the_session() -> None:
    bench, _ = await bench_in_fetch()
    bench.health.on_fault(bench.session.fail_all)
    bench.engine.fault = EngineFault("broken")
    bench.link.check()
    assert isinstance(failure(bench), EngineFault)
    bench.reader.end()
    await settle()
    bench.assert_idle()


@virtual_time
async def test_one_step_of_many_requests_makes_one_frame() -> None:
    bench = DecodeBench()
    names = [f"r{i}" for i in range(5)]
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
    from engine import TokensSampled
    from protocol.generation import Token

    bench.engine.emit(*[TokensSampled(s, (Token(i),), None, 0) for i, s in enumerate(seq_ids)])
    await settle()
    assert [d.request_id for d in bench.frame().deltas] == names
    bench.session.end()
    bench.assert_idle()
