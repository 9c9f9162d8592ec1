"""Retries, resumes, deadlines, overload and departures: nothing is repeated, missing, or left behind."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from router_kit import Bench, bench

from protocol.errors import (
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    LeaseExpired,
    Overloaded,
    SplitserveError,
    WorkerUnavailable,
)
from protocol.generation import GenerationRequest, SamplingParams
from protocol.ids import Role
from router.scripted_worker import ScriptedWorker

TEXT = "abcdefghijklmnop"


def request(running: Bench, deadline_s: float = 30.0, max_tokens: int = 100) -> GenerationRequest:
    return GenerationRequest(
        running.router.new_request_id(),
        (1, 2, 3),
        SamplingParams(max_tokens, seed=11),
        deadline_s=deadline_s,
    )


async def text_of(running: Bench, asked: GenerationRequest) -> str:
    """The whole output of a request, checked token by token."""
    token_ids: list[int] = []
    async with aclosing(running.router.orchestrator.generate(asked)) as deltas:
        async for delta in deltas:
            token_ids.extend(token.token_id for token in delta.tokens)
    return running.tokenizer.decode(token_ids)


@pytest.mark.parametrize("num_before", range(6))
async def test_stream_goes_on_elsewhere_when_its_decode_worker_dies(num_before: int) -> None:
    async with bench(TEXT, num_decode=2) as running:
        first, second = running.workers(Role.DECODE)
        for worker in (first, second):
            worker.num_until_pause = num_before
        task = asyncio.create_task(text_of(running, request(running)))
        await running.until(lambda: bool(first.requests or second.requests))
        used, other = (first, second) if first.requests else (second, first)
        await running.until(lambda: used.num_until_pause == 0 and not running.prefill.held)
        other.num_until_pause = None
        used.kill()
        assert await task == TEXT
        resumed = other.requests[-1]
        assert len(resumed.output_token_ids) == num_before + 1
        assert resumed.sampling == used.requests[0].sampling
        # One that died between its verdict and its first token leaves a ticket that is used up.
        num_offers = 2 if num_before == 0 else 1
        assert len(other.requests) == num_offers
        assert resumed.request_id == used.requests[0].request_id + f".{num_offers}"
        prefilled = running.prefill.requests[1]
        assert replace(prefilled, deadline_s=resumed.deadline_s) == resumed


async def test_request_waits_for_the_replacement_of_the_only_decode_worker() -> None:
    async with bench(TEXT) as running:
        running.decode.kill()
        running.cluster.forget(running.decode)
        task = asyncio.create_task(text_of(running, request(running)))
        await asyncio.sleep(0.05)
        assert running.prefill.requests == []  # no prefill whose KV nobody could take over
        running.cluster.add_worker(Role.DECODE)
        assert await task == TEXT


async def test_prefill_worker_that_dies_is_replaced_by_another() -> None:
    async with bench(TEXT, num_prefill=2) as running:
        for worker in running.workers(Role.PREFILL):
            worker.num_until_pause = 0
        task = asyncio.create_task(text_of(running, request(running)))
        await running.until(lambda: any(w.requests for w in running.workers(Role.PREFILL)))
        first, second = sorted(running.workers(Role.PREFILL), key=lambda w: not w.requests)
        second.num_until_pause = None
        first.kill()
        assert await task == TEXT
        assert second.requests[0].output_token_ids == ()


@pytest.mark.parametrize("role", list(Role))
async def test_retryable_failure_goes_to_another_worker_first(role: Role) -> None:
    async with bench(TEXT, num_prefill=2, num_decode=2, local_prefill_on_failure=False) as running:
        workers = running.workers(role)
        for worker in workers:
            worker.failures = [LeaseExpired("gone")]
        assert await text_of(running, request(running)) == TEXT
        assert sorted(len(worker.requests) for worker in workers) == [1, 2]
        assert not any(worker.failures for worker in workers)


async def test_same_worker_is_tried_again_when_it_is_the_only_one() -> None:
    async with bench(TEXT) as running:
        running.decode.failures = [LeaseExpired("gone"), EngineFault("restarting")]
        assert await text_of(running, request(running)) == TEXT
        assert [len(r.output_token_ids) for r in running.decode.requests] == [0, 1, 2]
        page = (await running.router.metrics_page()).decode()
        assert 'splitserve_request_retries_total{error="LeaseExpired"} 1.0' in page


async def test_retries_are_bounded() -> None:
    async with bench(TEXT, num_retries=2, local_prefill_on_failure=False) as running:
        running.prefill.failures = [LeaseExpired(f"number {n}") for n in range(5)]
        with pytest.raises(LeaseExpired, match="number 2"):
            await text_of(running, request(running))
        assert len(running.prefill.requests) == 3


async def test_long_stream_outlives_more_mishaps_than_a_request_has_retries() -> None:
    async with bench(TEXT, num_retries=1) as running:
        task = asyncio.create_task(text_of(running, request(running)))
        for _ in range(4):
            worker = running.workers(Role.DECODE)[-1]
            worker.num_until_pause = 2
            await running.until(lambda worker=worker: worker.num_until_pause == 0)
            worker.kill()
            running.cluster.forget(worker)
            running.cluster.add_worker(Role.DECODE)
        assert await task == TEXT


async def test_request_that_kills_every_decode_worker_ends_with_its_retries() -> None:
    """Each of its legs brings the client the token of a prefill worker."""
    async with bench(TEXT, num_decode=6, num_retries=2) as running:
        for worker in running.workers(Role.DECODE):
            worker.num_until_pause = 0
        task = asyncio.create_task(text_of(running, request(running)))
        victims: list[ScriptedWorker] = []
        while not task.done():
            has_begun = [w for w in running.workers(Role.DECODE) if w.is_alive and w.running]
            if has_begun and not running.prefill.held:
                has_begun[0].kill()
                running.cluster.forget(has_begun[0])
                victims += has_begun
            await asyncio.sleep(0)
        assert isinstance(task.exception(), SplitserveError)
        assert 0 < len(victims) <= 3


async def test_request_that_breaks_two_engines_gets_no_third_one(caplog: pytest.LogCaptureFixture) -> None:
    async with bench(TEXT, num_prefill=3) as running:
        for worker in running.workers(Role.PREFILL):
            worker.failures = [EngineFault("no finite logit for sequences other#1")]
        with pytest.raises(EngineFault) as caught:
            await text_of(running, request(running))
        assert "other" not in caught.value.message  # whose requests those are is no client's business
        assert "other#1" in caplog.text
        assert sorted(len(worker.requests) for worker in running.workers(Role.PREFILL)) == [0, 1, 1]
        for worker in running.workers(Role.PREFILL):
            worker.failures.clear()


async def test_failure_that_is_not_retryable_ends_the_request() -> None:
    async with bench(TEXT) as running:
        running.prefill.failures = [InvalidRequest("too long", param="prompt")]
        with pytest.raises(InvalidRequest, match="too long"):
            await text_of(running, request(running))
        assert len(running.prefill.requests) == 1


async def test_overload_of_all_workers_is_told_to_the_client_at_once() -> None:
    async with bench(TEXT, num_prefill=2) as running:
        for worker in running.workers(Role.PREFILL):
            worker.failures = [Overloaded("full", retry_after_s=0.0)] * 3
        with pytest.raises(Overloaded):
            await text_of(running, request(running))
        assert [len(w.requests) for w in running.workers(Role.PREFILL)] == [1, 1]


async def test_without_workers_the_request_fails_after_the_wait() -> None:
    async with bench(TEXT, num_decode=0, worker_wait_s=0.02) as running:
        with pytest.raises(WorkerUnavailable, match="no decode worker"):
            await text_of(running, request(running))


async def test_stopped_router_lets_nobody_wait() -> None:
    async with bench(TEXT, num_decode=0, worker_wait_s=1000.0) as running:
        task = asyncio.create_task(text_of(running, request(running, deadline_s=1000.0)))
        await asyncio.sleep(0)
        await running.router.stop()
        with pytest.raises(WorkerUnavailable, match="stopped"):
            await task


@pytest.mark.parametrize("stuck", [Role.PREFILL, Role.DECODE, None])
async def test_deadline_aborts_wherever_the_request_is(stuck: Role | None) -> None:
    async with bench(TEXT, num_decode=0 if stuck is None else 1) as running:
        for worker in running.workers(stuck) if stuck else []:
            worker.num_until_pause = 0
        with pytest.raises(DeadlineExceeded):
            await text_of(running, request(running, deadline_s=0.05))
        for worker in running.workers(stuck) if stuck else []:
            assert worker.aborted == [worker.requests[0].request_id]
            assert worker.requests[0].deadline_s <= 0.05


@pytest.mark.parametrize("stuck", list(Role))
async def test_closed_generator_aborts_wherever_the_request_is(stuck: Role) -> None:
    async with bench(TEXT) as running:
        worker = running.workers(stuck)[0]
        worker.num_until_pause = 0
        task = asyncio.create_task(text_of(running, request(running)))
        await running.until(lambda: bool(worker.running))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert worker.aborted == [worker.requests[0].request_id]


async def test_ticket_that_nobody_can_take_is_released_and_the_request_goes_on() -> None:
    async with bench(TEXT) as running:
        running.prefill.num_until_pause = 0
        task = asyncio.create_task(text_of(running, request(running)))
        await running.until(lambda: bool(running.prefill.running))
        running.decode.kill()
        running.prefill.resume()
        await running.until(lambda: bool(running.prefill.released))
        assert running.prefill.released == running.prefill.tickets
        running.cluster.add_worker(Role.DECODE)
        assert await task == TEXT
        assert [len(r.output_token_ids) for r in running.prefill.requests] == [0, 1]


async def test_load_spreads_over_workers() -> None:
    async with bench(TEXT, num_prefill=2, num_decode=3) as running:
        await asyncio.gather(*(text_of(running, request(running)) for _ in range(12)))
        assert [len(w.requests) for w in running.workers(Role.PREFILL)] == [6, 6]
        assert [len(w.requests) for w in running.workers(Role.DECODE)] == [4, 4, 4]


async def test_draining_workers_get_nothing_new() -> None:
    async with bench(TEXT, num_decode=2) as running:
        first, second = running.workers(Role.DECODE)
        await running.cluster.announce(replace(first.record, draining=True))
        await running.until(lambda: len(running.router.workers.decode_workers()) == 1)
        for _ in range(3):
            await text_of(running, request(running))
        assert (len(first.requests), len(second.requests)) == (0, 3)


async def test_rolling_update_pairs_workers_of_one_kind() -> None:
    async with bench(TEXT, num_decode=2) as running:
        first, second = running.workers(Role.DECODE)
        other = replace(first.record.fingerprint, revision="r2")
        await running.cluster.announce(replace(first.record, fingerprint=other))
        members = running.router.workers.decode_workers()
        await running.until(lambda: members[0].fingerprint.revision == "r2")
        for _ in range(3):
            await text_of(running, request(running))
        assert (len(first.requests), len(second.requests)) == (0, 3)


async def test_chaos_loses_and_repeats_no_token() -> None:
    """Workers die in turn under load, and are replaced; every client gets the undisturbed text."""
    async with bench(TEXT * 3, num_prefill=2, num_decode=2, num_retries=20) as running:
        tasks = [asyncio.create_task(text_of(running, request(running))) for _ in range(16)]
        for role in (Role.DECODE, Role.PREFILL, Role.DECODE, Role.DECODE, Role.PREFILL):
            for _ in range(7):
                await asyncio.sleep(0)
            running.cluster.add_worker(role)
            victim = next(w for w in running.workers(role) if w.is_alive)
            victim.kill()
            running.cluster.forget(victim)
            await running.all_usable()
        try:
            assert set(await asyncio.gather(*tasks)) == {TEXT * 3}
        except SplitserveError as error:  # pragma: no cover
            pytest.fail(f"a client saw {error!r}")
