"""When decode workers compute prompts themselves, when they must not, and what operators see of it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from router_kit import MODEL, Bench, bench
from virtual_time import settle, virtual_time

from protocol.errors import EngineFault, LeaseExpired, Overloaded, TransferFailed, WorkerUnavailable
from protocol.generation import GenerationRequest, SamplingParams
from protocol.ids import Role
from protocol.membership import Load

TEXT = "abcdefgh"
BLOCK_SIZE = 16


def request(running: Bench, num_tokens: int = 3, **more: Any) -> GenerationRequest:
    return GenerationRequest(
        running.router.new_request_id(),
        tuple(range(1, num_tokens + 1)),
        SamplingParams(100, seed=11, **more),
        deadline_s=60.0,
    )


async def text_of(running: Bench, asked: GenerationRequest) -> str:
    token_ids: list[int] = []
    async with aclosing(running.router.orchestrator.generate(asked)) as deltas:
        async for delta in deltas:
            token_ids.extend(token.token_id for token in delta.tokens)
    return running.tokenizer.decode(token_ids)


async def lose_prefill_worker(running: Bench) -> None:
    running.prefill.kill()
    running.cluster.forget(running.prefill)
    await running.until(lambda: not running.router.workers.prefill_workers())


async def page_of(running: Bench) -> str:
    return (await running.router.metrics_page()).decode()


@virtual_time
async def test_first_request_waits_for_the_grace_and_later_ones_do_not() -> None:
    async with bench(TEXT, prefill_grace_s=2.0) as running:
        await lose_prefill_worker(running)
        clock = asyncio.get_running_loop().time
        since = clock()
        assert await text_of(running, request(running)) == TEXT
        assert 1.9 < clock() - since < 2.1
        since = clock()
        assert await text_of(running, request(running)) == TEXT
        assert clock() - since < 0.1
        assert running.decode.tickets == []
        assert 'splitserve_local_prefills_total{reason="no_prefill_worker"} 2.0' in await page_of(running)


@virtual_time
async def test_prefill_worker_that_returns_within_the_grace_is_waited_for() -> None:
    async with bench(TEXT, prefill_grace_s=2.0) as running:
        await lose_prefill_worker(running)
        task = asyncio.create_task(text_of(running, request(running)))
        await asyncio.sleep(1.0)
        replacement = running.cluster.add_worker(Role.PREFILL)
        assert await task == TEXT
        assert running.decode.tickets == replacement.tickets


@virtual_time
async def test_without_the_fallback_the_request_fails_after_the_wait() -> None:
    async with bench(TEXT, local_prefill_on_failure=False, worker_wait_s=5.0) as running:
        await lose_prefill_worker(running)
        with pytest.raises(WorkerUnavailable, match="no prefill worker"):
            await text_of(running, request(running))
        assert running.decode.requests == []


@virtual_time
async def test_scored_prompts_are_for_prefill_workers_alone() -> None:
    async with bench(TEXT, worker_wait_s=5.0, local_prefill_tokens=1000) as running:
        await text_of(running, request(running, prompt_logprobs=0))
        assert len(running.decode.tickets) == 1
        await lose_prefill_worker(running)
        with pytest.raises(WorkerUnavailable, match="no prefill worker"):
            await text_of(running, request(running, prompt_logprobs=0))


@pytest.mark.parametrize("error", [EngineFault("broken"), WorkerUnavailable("drained"), LeaseExpired("x")])
def test_prompt_that_no_prefill_worker_could_compute_is_computed_locally(error: Any) -> None:
    @virtual_time
    async def scenario() -> None:
        async with bench(TEXT, prefill_grace_s=3600.0) as running:
            running.prefill.failures = [error]
            assert await text_of(running, request(running)) == TEXT
            assert len(running.prefill.requests) == 1
            assert running.decode.tickets == []
            assert 'splitserve_local_prefills_total{reason="prefill_failed"} 1.0' in await page_of(running)

    scenario()


@virtual_time
async def test_other_prefill_workers_are_tried_before() -> None:
    async with bench(TEXT, num_prefill=2) as running:
        for worker in running.workers(Role.PREFILL):
            worker.failures = [WorkerUnavailable("drained")]
        assert await text_of(running, request(running)) == TEXT
        assert [len(worker.requests) for worker in running.workers(Role.PREFILL)] == [1, 1]
        assert running.decode.tickets == []


@virtual_time
async def test_death_of_the_only_prefill_worker_during_a_prompt_needs_no_grace() -> None:
    async with bench(TEXT, prefill_grace_s=3600.0) as running:
        running.prefill.num_until_pause = 0
        task = asyncio.create_task(text_of(running, request(running)))
        await running.until(lambda: bool(running.decode.requests))
        await lose_prefill_worker(running)
        assert await task == TEXT
        assert running.decode.aborted == [running.decode.requests[0].request_id]


@virtual_time
async def test_full_prefill_worker_is_no_reason_to_do_without() -> None:
    async with bench(TEXT) as running:
        running.decode.num_until_pause = 2
        task = asyncio.create_task(text_of(running, request(running)))
        await running.until(lambda: running.decode.num_until_pause == 0)
        running.prefill.failures = [Overloaded("full", retry_after_s=0.5)]
        running.decode.kill()
        replacement = running.cluster.add_worker(Role.DECODE)
        assert await task == TEXT
        assert len(running.prefill.requests) == 3
        assert len(replacement.tickets) == 1


@virtual_time
async def test_transfer_that_fails_from_the_only_prefill_worker_is_not_tried_again() -> None:
    async with bench(TEXT) as running:
        running.decode.failures = [TransferFailed("no route")]
        assert await text_of(running, request(running)) == TEXT
        assert len(running.decode.tickets) == 1
        assert len(running.decode.requests) == 2


@virtual_time
async def test_pools_of_two_versions_serve_on_while_an_update_rolls() -> None:
    async with bench(TEXT) as running:
        changed = replace(running.prefill.record.fingerprint, revision="r2")
        await running.cluster.announce(replace(running.prefill.record, fingerprint=changed))
        members = running.router.workers.prefill_workers()
        await running.until(lambda: members[0].fingerprint.revision == "r2")
        assert await text_of(running, request(running)) == TEXT
        assert running.prefill.requests == []
        assert 'splitserve_local_prefills_total{reason="no_pair"} 1.0' in await page_of(running)


@virtual_time
async def test_stream_that_began_locally_is_resumed_elsewhere() -> None:
    async with bench(TEXT, num_decode=2, prefill_grace_s=0.0) as running:
        await lose_prefill_worker(running)
        for worker in running.workers(Role.DECODE):
            worker.num_until_pause = 3
        task = asyncio.create_task(text_of(running, request(running)))
        await running.until(lambda: any(w.num_until_pause == 0 for w in running.workers(Role.DECODE)))
        used, other = sorted(running.workers(Role.DECODE), key=lambda w: not w.requests)
        used.kill()
        other.resume()
        assert await task == TEXT
        assert [len(leg.output_token_ids) for leg in other.requests] == [3]


@virtual_time
async def test_leaving_client_aborts_a_prompt_that_is_computed_locally() -> None:
    async with bench(TEXT, prefill_grace_s=0.0) as running:
        await lose_prefill_worker(running)
        running.decode.num_until_pause = 0
        task = asyncio.create_task(text_of(running, request(running)))
        await running.until(lambda: bool(running.decode.running))
        task.cancel()
        await asyncio.wait([task])
        assert running.decode.aborted == [running.decode.requests[0].request_id]


@virtual_time
async def test_choices_of_a_local_prompt_are_complete_and_can_be_dropped() -> None:
    async with bench(prefill_grace_s=0.0) as running, running.client() as client:
        await lose_prefill_worker(running)
        body = {"model": MODEL, "prompt": "hi", "n": 3, "stop": ["wor"], "logprobs": 1}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert [choice["text"] for choice in answer["choices"]] == ["hello "] * 3
        alone = await client.post("/v1/completions", json=body | {"max_tokens": 1, "n": 1})
        assert alone.json()["choices"][0]["text"] == "hello"


@virtual_time
async def test_short_prompts_are_computed_where_they_are_decoded() -> None:
    async with bench(TEXT, local_prefill_tokens=20) as running:
        running.decode.report(Load(blocks_total=1000, blocks_free=1000))
        assert await text_of(running, request(running, num_tokens=20)) == TEXT
        assert await text_of(running, request(running, num_tokens=BLOCK_SIZE + 21)) == TEXT
        assert (len(running.decode.requests), len(running.decode.tickets)) == (2, 1)
        assert 'splitserve_local_prefills_total{reason="short"} 1.0' in await page_of(running)


@virtual_time
async def test_what_the_decode_worker_was_sent_before_does_not_count() -> None:
    async with bench(TEXT, local_prefill_tokens=BLOCK_SIZE) as running, running.client() as client:
        running.decode.report(Load(blocks_total=1000, blocks_free=1000))
        for expected in (1, 1, 1):
            await text_of(running, request(running, num_tokens=4 * BLOCK_SIZE))
            assert len(running.decode.tickets) == expected
        await text_of(running, request(running, num_tokens=6 * BLOCK_SIZE))
        assert len(running.decode.tickets) == 2
        await client.post("/reset_prefix_cache")
        await text_of(running, request(running, num_tokens=6 * BLOCK_SIZE))
        assert len(running.decode.tickets) == 3


@virtual_time
async def test_prompt_that_was_computed_locally_for_want_of_owners_is_known_to_be_there() -> None:
    async with bench(TEXT, local_prefill_tokens=BLOCK_SIZE, prefill_grace_s=0.0) as running:
        running.decode.report(Load(blocks_total=1000, blocks_free=1000))
        await lose_prefill_worker(running)
        assert await text_of(running, request(running, 4 * BLOCK_SIZE)) == TEXT
        running.cluster.add_worker(Role.PREFILL)
        await running.until(lambda: bool(running.router.workers.prefill_workers()))
        assert await text_of(running, request(running, 4 * BLOCK_SIZE)) == TEXT
        assert 'local_prefills_total{reason="short"} 1.0' in await page_of(running)


@virtual_time
async def test_service_without_prefill_workers_is_alive_but_not_ready() -> None:
    async with bench(prefill_grace_s=0.0) as running, running.client() as client:
        assert (await client.get("/health")).json()["status"] == "ok"
        await lose_prefill_worker(running)
        health = await client.get("/health")
        assert health.status_code == 200
        assert health.json() == {
            "status": "degraded",
            "reason": "no usable prefill worker",
            "prefill_workers": 0,
            "decode_workers": 1,
        }
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "no usable prefill worker")


@virtual_time
async def test_service_that_must_not_fall_back_is_unhealthy_without_prefill_workers() -> None:
    async with bench(local_prefill_on_failure=False) as running, running.client() as client:
        await lose_prefill_worker(running)
        health = await client.get("/health")
        assert (health.status_code, health.json()["reason"]) == (503, "no usable prefill worker")


@virtual_time
async def test_canary_hands_off_however_short_its_prompt_is() -> None:
    async with bench(local_prefill_tokens=1000, canary_interval_s=10.0) as running:
        await asyncio.sleep(60.0)
        assert len(running.decode.tickets) >= 5
        assert running.router.not_ready_because() is None
        running.prefill.failures = [LeaseExpired("x")] * 1000
        await asyncio.sleep(60.0)
        assert "failed" in (running.router.not_ready_because() or "")
        running.prefill.failures = []
        await asyncio.sleep(2.0)
        await settle()
