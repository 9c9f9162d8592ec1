"""HTTP to device and back: a real router, real workers over gRPC, real engines on fake devices."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from router_kit import MODEL, SETTINGS, byte_level_tokenizer
from worker_fakes import BLOCK_SIZE, CLUSTER_TOKEN, FINGERPRINT, P0, MemoryDirectory
from worker_stations import MAX_MODEL_LEN, Station, profile

from decode_worker import DecodeWorker, DecodeWorkerConfig
from engine import FakeExecutor
from kv_transfer import LoopbackNetwork
from prefill_worker import PrefillWorker, PrefillWorkerConfig
from protocol.generation import choice_seed
from protocol.ids import WorkerId, WorkerIdentity
from router import Router, build_app

PROMPT = list(range(1, 31))
SEED = 7


@dataclass(slots=True)
class Stack:
    """One prefill worker, some decode workers, a router and its client."""

    router: Router
    client: httpx.AsyncClient
    prefill: PrefillWorker
    decodes: list[DecodeWorker]
    stations: list[Station]
    """Of the prefill workers first, then of the decode workers."""

    async def complete(self, **more: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": PROMPT, "seed": SEED, "return_token_ids": True}
        return await self.client.post("/v1/completions", json=body | more)


@asynccontextmanager
async def stack(num_decode: int = 1, num_prefill: int = 1, **scheduler: Any) -> AsyncIterator[Stack]:
    """Started and proved to work; at the end no block is lost. `scheduler`: of the prefill workers."""
    network, directory = LoopbackNetwork(), MemoryDirectory()
    identities = [WorkerIdentity(WorkerId(f"d{i}"), f"d-{i}") for i in range(num_decode)]
    owners = [P0, *(WorkerIdentity(WorkerId(f"p{i}"), f"p-{i}") for i in range(1, num_prefill))]
    stations = [Station(i, network, **scheduler) for i in owners] + [
        Station(i, network) for i in identities
    ]
    prefills = [
        PrefillWorker(
            profile=profile(identity, FINGERPRINT),
            make_engine=station.engine,
            transport=station.transport,
            directory=directory,
            config=PrefillWorkerConfig(),
        )
        for identity, station in zip(owners, stations[:num_prefill], strict=True)
    ]
    decodes = [
        DecodeWorker(
            profile=profile(identity, FINGERPRINT),
            make_engine=station.engine,
            reader=station.reader(FINGERPRINT),
            directory=directory,
            config=DecodeWorkerConfig(),
        )
        for identity, station in zip(identities, stations[num_prefill:], strict=True)
    ]
    router = Router(
        settings=replace(SETTINGS, metrics_timeout_s=5.0, prefill_grace_s=0.1),
        directory=directory,
        tokenizer=byte_level_tokenizer(),
        served_model_name=MODEL,
        max_model_len=MAX_MODEL_LEN,
        cluster_token=CLUSTER_TOKEN,
    )
    transport = httpx.ASGITransport(app=build_app(router))
    workers = [*prefills, *decodes]
    async with httpx.AsyncClient(transport=transport, base_url="http://router", timeout=30) as client:
        try:
            for worker in workers:
                await worker.start("127.0.0.1", 0)
            await router.start()
            await until(lambda: router.not_ready_because() is None)
            await until(lambda: len(router.workers.decode_workers()) == num_decode)
            await until(lambda: len(router.workers.prefill_workers()) == num_prefill)
            yield Stack(router, client, prefills[0], decodes, stations)
            router.assert_idle()
        finally:
            await router.stop()
            for worker in workers:
                await worker.stop()
    for station in stations:
        if station.breaks:
            continue  # nobody asks a broken engine where its blocks are
        station.core.check_integrity()
        station.core.assert_idle()


async def until(is_true: Any) -> None:
    async with asyncio.timeout(20):
        while not is_true():  # noqa: ASYNC110  # nobody signals what these tests wait for
            await asyncio.sleep(0.005)


def oracle(index: int, max_tokens: int) -> list[int]:
    """The tokens of one choice, whatever happens on the way."""
    executor, tokens = FakeExecutor(BLOCK_SIZE), list(PROMPT)
    for _ in range(max_tokens):
        tokens.append(executor.next_token(tokens, choice_seed(SEED, index)))
    return tokens[len(PROMPT) :]


async def test_choices_over_http_are_those_of_one_engine_alone() -> None:
    async with stack() as running:
        answer = (await running.complete(n=5, max_tokens=20)).json()
        assert [c["token_ids"] for c in answer["choices"]] == [oracle(i, 20) for i in range(5)]
        assert answer["usage"]["completion_tokens"] == 100
        assert answer["usage"]["prompt_tokens"] == len(PROMPT)


async def test_choices_survive_the_death_of_their_decode_worker_in_mid_stream() -> None:
    async with stack(num_decode=2) as running:
        for station in running.stations[1:]:
            station.gate_s = 0.03
        task = asyncio.create_task(running.complete(n=3, max_tokens=40, stream=True))
        await until(lambda: any(len(station.executor.plans) > 5 for station in running.stations[1:]))
        victim = next(w for w in running.decodes if w.record().load.num_running)
        await victim.stop()
        for station in running.stations:
            station.gate_s = 0.0
        lines = (await task).text.split("\n\n")[:-1]
        assert lines.pop() == "data: [DONE]"
        tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for line in lines:
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            tokens[choice["index"]] += choice["token_ids"]
        assert tokens == {index: oracle(index, 40) for index in range(3)}
        page = (await running.client.get("/metrics")).text
        assert "splitserve_request_retries_total{" in page


async def test_stop_string_of_one_choice_frees_its_blocks_alone() -> None:
    async with stack() as running:
        tokenizer = running.router.tokenizer
        running.stations[1].gate_s = 0.005
        whole = (await running.complete(n=2, max_tokens=40)).json()["choices"]
        stop = tokenizer.decode(oracle(1, 40)[10:14])
        answer = (await running.complete(n=2, max_tokens=40, stop=stop)).json()["choices"]
        assert stop in whole[1]["text"]
        assert answer[1]["finish_reason"] == "stop"
        assert answer[1]["text"] == whole[1]["text"].split(stop)[0]
        assert answer[0]["text"] == whole[0]["text"].split(stop)[0]


async def test_prompt_scores_cross_all_seams() -> None:
    async with stack() as running:
        scores = FakeExecutor(BLOCK_SIZE).prompt_scores(PROMPT)
        for _ in range(2):  # the second time the prompt is cached
            answer = (await running.complete(echo=True, logprobs=0, max_tokens=0)).json()
            logprobs = answer["choices"][0]["logprobs"]
            assert logprobs["token_logprobs"] == [None, *scores]


async def test_full_prefill_worker_answers_429_with_the_time_to_come_back() -> None:
    async with stack(max_num_seqs=1, max_num_waiting=2, overload_retry_after_s=1.5) as running:
        running.stations[0].gate_s = 0.05
        answers = await asyncio.gather(*(running.complete(max_tokens=1) for _ in range(12)))
        refused = [answer for answer in answers if answer.status_code != 200]
        assert refused
        assert len(refused) < 12
        for answer in refused:
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "2"
            assert answer.json()["error"]["type"] == "rate_limit_error"


async def test_reset_makes_a_cached_prompt_be_computed_again() -> None:
    def num_cached(answer: httpx.Response) -> int:
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    async with stack(num_decode=2) as running:
        assert num_cached(await running.complete()) == 0
        assert num_cached(await running.complete()) >= len(PROMPT) - BLOCK_SIZE
        assert num_cached(await running.complete(cache_salt="tenant")) == 0
        reset = await running.client.post("/reset_prefix_cache", json={"prompt": PROMPT[:8]})
        assert (reset.status_code, len(reset.json()["workers"])) == (200, 3)
        assert num_cached(await running.complete()) == 0
        assert num_cached(await running.complete(cache_salt="tenant")) >= len(PROMPT) - BLOCK_SIZE
        await running.client.post("/reset_prefix_cache")
        assert num_cached(await running.complete(cache_salt="tenant")) == 0


async def test_one_page_shows_what_every_engine_has_done() -> None:
    async with stack() as running:
        await running.complete(n=3, max_tokens=10)
        page = (await running.client.get("/metrics")).text
    values = {
        (sample.name.removeprefix("splitserve_"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }

    def value(name: str, role: str, worker_id: str, **labels: str) -> float:
        return values[name, frozenset((labels | {"role": role, "worker_id": worker_id}).items())]

    for worker in (("prefill", "p0"), ("decode", "d0")):
        num_steps = value("iteration_num_seqs_count", *worker)
        assert value("iteration_seconds_count", *worker, part="execute") == num_steps > 0
    canary = 4  # tokens; it ran before
    computed = value("prompt_tokens_by_source_total", "prefill", "p0", source="computed")
    assert computed == len(PROMPT) + canary
    transferred = value("prompt_tokens_by_source_total", "decode", "d0", source="transferred")
    assert transferred == len(PROMPT) + canary
    assert value("iteration_num_seqs_bucket", "decode", "d0", le="4.0") == (
        value("iteration_num_seqs_count", "decode", "d0")
    )
    assert value("sampled_tokens_total", "decode", "d0") == 3 * 9 + 1


@pytest.mark.parametrize("broken", [0, 2])
async def test_requests_go_on_elsewhere_when_an_engine_breaks(broken: int) -> None:
    """Of a prefill worker, and of a decode worker; its worker takes itself out of the way."""
    async with stack(num_decode=2, num_prefill=2) as running:
        for station in running.stations:
            station.gate_s = 0.005
        station = running.stations[broken]
        station.breaks = is_prefill = broken < 2  # too quick to be caught in the middle
        tasks = [asyncio.create_task(running.complete(max_tokens=40)) for _ in range(6)]
        await until(lambda: is_prefill or bool(station.core.live_sequence_ids))
        station.breaks = True
        for answer in await asyncio.gather(*tasks):
            assert answer.json()["choices"][0]["token_ids"] == oracle(0, 40)
        members = running.router.workers
        assert len(members.prefill_workers()) + len(members.decode_workers()) == 3


async def test_decode_workers_go_on_alone_when_the_prefill_worker_is_gone() -> None:
    async with stack() as running:
        await running.prefill.stop()
        await until(lambda: not running.router.workers.prefill_workers())
        answer = (await running.complete(n=3, max_tokens=40)).json()
        for choice in answer["choices"]:
            assert choice["token_ids"] == oracle(choice["index"], 40)
        health = await running.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")


async def test_more_requests_than_the_pool_holds_wait_for_credit_and_all_come_through() -> None:
    async with stack() as running:
        answers = await asyncio.gather(*(running.complete(max_tokens=20) for _ in range(25)))
        assert [answer.json()["choices"][0]["token_ids"] for answer in answers] == [oracle(0, 20)] * 25
        page = (await running.client.get("/metrics")).text
        assert "splitserve_request_retries_total{" not in page
        (waits,) = re.findall(r"splitserve_request_credit_wait_seconds_count (\S+)", page)
        assert float(waits) > 0


@pytest.mark.parametrize("num_steps", [0, 1, 5])
async def test_stream_is_right_when_its_decode_worker_stops_at_any_step(num_steps: int) -> None:
    async with stack(num_decode=2) as running:
        for station in running.stations:
            station.gate_s = 0.01
        task = asyncio.create_task(running.complete(max_tokens=40, logprobs=1))
        await until(lambda: any(station.core.live_sequence_ids for station in running.stations[1:]))
        used = next(i for i, station in enumerate(running.stations[1:]) if station.core.live_sequence_ids)
        await asyncio.sleep(num_steps * 0.01)
        await running.decodes[used].stop()
        choice = (await task).json()["choices"][0]
        assert choice["token_ids"] == oracle(0, 40)
        assert len(choice["logprobs"]["token_logprobs"]) == 40
