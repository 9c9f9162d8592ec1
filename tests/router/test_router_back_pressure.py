"""No prompt is computed that no decode worker can land, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from router_kit import Bench, bench
from virtual_time import settle, virtual_time

from protocol.errors import DeadlineExceeded, WorkerUnavailable
from protocol.generation import GenerationRequest, SamplingParams
from protocol.ids import Role
from protocol.membership import Load

TEXT = "abcdefgh"
BLOCK_SIZE = 16


def request(running: Bench, num_blocks: int = 1, deadline_s: float = 60.0) -> GenerationRequest:
    """One that needs so many blocks to begin with."""
    return GenerationRequest(
        running.router.new_request_id(),
        tuple(range(1, num_blocks * BLOCK_SIZE)),
        SamplingParams(100, seed=11),
        deadline_s=deadline_s,
    )


async def text_of(running: Bench, asked: GenerationRequest) -> str:
    token_ids: list[int] = []
    async with aclosing(running.router.orchestrator.generate(asked)) as deltas:
        async for delta in deltas:
            token_ids.extend(token.token_id for token in delta.tokens)
    return running.tokenizer.decode(token_ids)


def ask(running: Bench, num_blocks: int = 1, deadline_s: float = 60.0) -> asyncio.Task[str]:
    return asyncio.create_task(text_of(running, request(running, num_blocks, deadline_s)))


def make_small(running: Bench, num_blocks: int) -> None:
    for worker in running.workers(Role.DECODE):
        worker.pool_blocks = num_blocks
        worker.report(Load(num_running=1, blocks_total=100))


@virtual_time
async def test_no_prefill_starts_without_credit() -> None:
    async with bench(TEXT) as running:
        make_small(running, 4)
        running.decode.num_until_pause = 0
        tasks = [ask(running, 2) for _ in range(3)]
        await asyncio.sleep(1.0)
        assert len(running.prefill.requests) == len(running.decode.running) == 2
        assert running.router.workers.credits.num_waiting == 1
        running.decode.resume()
        assert await asyncio.gather(*tasks) == [TEXT] * 3
        page = (await running.router.metrics_page()).decode()
        assert "splitserve_request_credit_wait_seconds_count 1.0" in page
        assert "splitserve_request_credit_wait_seconds_sum 1.0" in page
        assert "splitserve_num_requests_waiting_for_credit 0.0" in page


@virtual_time
async def test_credit_is_promised_before_its_ticket_comes() -> None:
    async with bench(TEXT) as running:
        make_small(running, 4)
        running.prefill.is_full = True
        tasks = [ask(running, 2) for _ in range(3)]
        await settle()
        for _ in range(3):  # frames of a worker that has heard of nothing yet
            running.decode.report(Load(num_running=1))
        await settle()
        assert len(running.prefill.requests) == 2
        running.prefill.resume()
        assert await asyncio.gather(*tasks) == [TEXT] * 3


@virtual_time
async def test_worker_with_credit_is_chosen_before_the_one_with_less_work() -> None:
    async with bench(TEXT, num_decode=2) as running:
        full, free = running.workers(Role.DECODE)
        full.pool_blocks = 1
        full.report(Load(num_running=1))
        free.report(Load(num_running=50))
        await asyncio.gather(*(ask(running, 2) for _ in range(3)))
        assert (len(full.requests), len(free.requests)) == (0, 3)


@virtual_time
async def test_request_waits_for_credit_longer_than_for_a_worker_that_is_not_there() -> None:
    """Regression: a burst that took over `worker_wait_s` to work off was refused in part."""
    async with bench(TEXT, worker_wait_s=5.0) as running:
        make_small(running, 1)
        task = ask(running, 2, deadline_s=100.0)
        await asyncio.sleep(60.0)
        assert not task.done()
        running.decode.pool_blocks = 1000
        running.decode.report(Load(num_running=1))
        assert await task == TEXT


@virtual_time
async def test_wait_for_credit_ends_soon_when_no_decode_worker_is_left() -> None:
    async with bench(TEXT, worker_wait_s=5.0) as running:
        make_small(running, 1)
        task = ask(running, 2, deadline_s=100.0)
        await settle()
        running.decode.kill()
        with pytest.raises(WorkerUnavailable):
            await task
        assert running.prefill.requests == []


@virtual_time
async def test_deadline_ends_the_wait_for_credit() -> None:
    async with bench(TEXT, worker_wait_s=50.0) as running:
        make_small(running, 1)
        with pytest.raises(DeadlineExceeded):
            await ask(running, 2, deadline_s=3.0)


@virtual_time
async def test_leaving_client_leaves_the_queue_for_credit() -> None:
    async with bench(TEXT) as running:
        make_small(running, 1)
        task = ask(running, 2)
        await settle()
        task.cancel()
        await asyncio.wait([task])
        assert running.router.workers.credits.num_waiting == 0


@virtual_time
async def test_new_worker_serves_those_who_wait() -> None:
    async with bench(TEXT) as running:
        make_small(running, 1)
        task = ask(running, 2)
        await settle()
        added = running.cluster.add_worker(Role.DECODE)
        assert await task == TEXT
        assert len(added.requests) == 1


@virtual_time
async def test_idle_worker_is_given_what_it_may_be_too_small_for() -> None:
    """It knows best; nobody may wait for credit that cannot come."""
    async with bench(TEXT) as running:
        make_small(running, 1)
        running.decode.report(Load(blocks_total=1))
        assert await ask(running, 2) == TEXT


@virtual_time
async def test_resumed_request_is_served_before_new_ones() -> None:
    async with bench(TEXT, num_decode=2) as running:
        for worker in running.workers(Role.DECODE):
            worker.num_until_pause = 2
        resumed = ask(running)
        await running.until(lambda: any(w.num_until_pause == 0 for w in running.workers(Role.DECODE)))
        used, other = sorted(running.workers(Role.DECODE), key=lambda w: not w.requests)
        make_small(running, 0)
        new = ask(running)
        await settle()
        used.kill()
        await asyncio.sleep(0.1)
        assert other.requests == []
        other.resume()
        other.pool_blocks = 2
        other.report(Load(num_running=1))
        assert await asyncio.gather(resumed, new) == [TEXT] * 2
        assert [len(leg.output_token_ids) for leg in other.requests] == [3, 0]


@virtual_time
async def test_many_requests_over_a_small_pool_all_come_through() -> None:
    async with bench(TEXT, num_prefill=2, num_decode=2) as running:
        make_small(running, 5)
        tasks = [ask(running, 1 + number % 4) for number in range(30)]
        assert await asyncio.gather(*tasks) == [TEXT] * 30
