"""Several choices of one request: one prefill, one ticket, one stream; each choice ends by itself.

The scripted workers answer a choice by its seed alone, so that a choice that goes on elsewhere under a
wrong seed or number gives a wrong text.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from router_kit import MODEL, Bench, bench

from protocol.errors import (
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    LeaseExpired,
    SplitserveError,
)
from protocol.generation import GenerationRequest, SamplingParams, choice_seed
from protocol.ids import Role

SEED = 11
TEXTS = ("abcdefgh", "ijkl", "mnopqrstuvwx", "", "yz")
"""By choice. The fourth one ends with its first token."""

_BY_SEED = {choice_seed(SEED, index): text for index, text in enumerate(TEXTS)}


def text_by_seed(request: GenerationRequest) -> str:
    return _BY_SEED.get(request.sampling.seed, "canary")


@asynccontextmanager
async def choices_bench(**changes: Any) -> AsyncIterator[Bench]:
    async with bench(texts=text_by_seed, **changes) as running:
        yield running


def request(
    running: Bench, n: int = len(TEXTS), deadline_s: float = 30.0, max_tokens: int = 100
) -> GenerationRequest:
    sampling = SamplingParams(max_tokens, seed=SEED)
    return GenerationRequest(
        running.router.new_request_id(), (1, 2, 3), sampling, deadline_s=deadline_s, n=n
    )


async def texts_of(running: Bench, asked: GenerationRequest) -> list[str]:
    """The texts of all choices, each checked to end once and to say nothing afterwards."""
    token_ids: list[list[int]] = [[] for _ in range(asked.n)]
    ended: set[int] = set()
    async with aclosing(running.router.orchestrator.generate(asked)) as deltas:
        async for delta in deltas:
            assert delta.index not in ended
            token_ids[delta.index].extend(token.token_id for token in delta.tokens)
            if delta.finish_reason is not None:
                ended.add(delta.index)
    assert ended == set(range(asked.n))
    return [running.tokenizer.decode(ids) for ids in token_ids]


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hello", "n": len(TEXTS), "seed": SEED, "max_tokens": 100} | more


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_choice_seeds_are_fixed_and_all_different() -> None:
    """They are part of the wire's meaning: a choice that goes on elsewhere must find its seed again."""
    assert choice_seed(SEED, 0) == SEED
    assert choice_seed(0, 1) == 0xE220A8397B1DCDAF  # SplitMix64's first output from state 0
    assert choice_seed(0, 2) == 0x6E789E6AA1B965F4
    seeds = {choice_seed(seed, index) for seed in (0, 1, SEED, 2**64 - 1) for index in range(16)}
    assert len(seeds) == 64
    assert all(0 <= seed < 2**64 for seed in seeds)


async def test_all_choices_come_of_one_prefill_and_one_ticket() -> None:
    async with choices_bench() as running:
        assert await texts_of(running, request(running)) == list(TEXTS)
        (prefilled,) = running.prefill.requests
        (decoded,) = running.decode.requests
        assert (prefilled.n, decoded.n) == (5, 5)
        assert prefilled.sampling.seed == decoded.sampling.seed == SEED
        assert len(running.prefill.tickets) == len(running.decode.tickets) == 1


async def test_answer_has_every_choice_and_counts_the_prompt_once() -> None:
    async with choices_bench() as running, running.client() as client:
        answer = (await client.post("/v1/completions", json=body())).json()
        assert [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]] == [
            (index, text, "stop") for index, text in enumerate(TEXTS)
        ]
        num_output = sum(len(text) + 1 for text in TEXTS)
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, num_output)
        assert usage["total_tokens"] == 2 + num_output
        page = (await client.get("/metrics")).text
        assert f"splitserve_generation_tokens_total {float(num_output)}" in page
        assert "splitserve_prompt_tokens_total 2.0" in page
        assert 'splitserve_request_success_total{finished_reason="stop"} 1.0' in page
        assert "splitserve_time_to_first_token_seconds_count 1.0" in page
        assert f"splitserve_inter_token_latency_seconds_count {float(num_output - 5)}" in page
        assert "splitserve_request_time_per_output_token_seconds_count 4.0" in page


async def test_chat_choices_each_have_a_message_of_their_own() -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 1}
    async with choices_bench() as running, running.client() as client:
        answer = (await client.post("/v1/chat/completions", json=body(prompt=None) | chat)).json()
        assert [c["message"]["content"] for c in answer["choices"]] == list(TEXTS)
        assert [len(c["logprobs"]["content"]) for c in answer["choices"]] == [len(t) + 1 for t in TEXTS]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_stream_interleaves_choices_by_their_index(path: str) -> None:
    is_chat = "chat" in path
    asked = body(stream=True, stream_options={"include_usage": True})
    if is_chat:
        asked |= {"messages": [{"role": "user", "content": "hi"}], "prompt": None}
    async with choices_bench() as running, running.client() as client:
        chunks = events((await client.post(path, json=asked)).text)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == sum(len(text) + 1 for text in TEXTS)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts, order = [""] * len(TEXTS), list[int]()
    for choice in choices:
        texts[choice["index"]] += choice["delta"].get("content", "") if is_chat else choice["text"]
        order.append(choice["index"])
    assert texts == list(TEXTS)
    assert sorted(c["index"] for c in choices if c["finish_reason"]) == list(range(len(TEXTS)))
    assert order != sorted(order)
    if is_chat:
        roles = [c["index"] for c in choices if c["delta"].get("role") == "assistant"]
        assert roles == list(range(len(TEXTS)))


async def test_logprobs_belong_to_their_choice() -> None:
    async with choices_bench() as running, running.client() as client:
        answer = (await client.post("/v1/completions", json=body(logprobs=1))).json()
        for choice, text in zip(answer["choices"], TEXTS, strict=True):
            assert choice["logprobs"]["tokens"] == [*text, "<|eos|>"]
            assert choice["logprobs"]["text_offset"] == list(range(len(text) + 1))


async def test_choice_that_ends_with_its_first_token_does_not_go_on_at_a_decode_worker() -> None:
    async with choices_bench() as running:
        running.decode.num_until_pause = 0
        task = asyncio.create_task(texts_of(running, request(running)))
        await running.until(lambda: bool(running.decode.num_first_tokens))
        assert running.decode.num_first_tokens == [4]
        running.decode.resume()
        assert await task == list(TEXTS)


async def test_choices_of_one_token_need_no_decode_worker() -> None:
    async with choices_bench() as running, running.client() as client:
        answer = (await client.post("/v1/completions", json=body(max_tokens=1))).json()
        assert [c["text"] for c in answer["choices"]] == [text[:1] for text in TEXTS]
        assert answer["usage"]["completion_tokens"] == 5
        assert running.decode.requests == []
        assert running.prefill.held == {}


async def test_decode_worker_is_told_when_all_choices_ended_with_their_first_token() -> None:
    async with bench(texts=lambda asked: "canary" if asked.sampling.ignore_eos else "") as running:
        running.prefill.num_until_pause = 0
        task = asyncio.create_task(texts_of(running, request(running, n=2)))
        await running.until(lambda: bool(running.decode.requests))
        running.prefill.resume()
        assert await task == ["", ""]
        assert running.decode.aborted == [running.decode.requests[0].request_id]
        assert running.prefill.released == []  # its owner knows that by itself


async def test_stop_string_of_one_choice_aborts_that_choice_alone() -> None:
    async with choices_bench() as running, running.client() as client:
        answer = (await client.post("/v1/completions", json=body(stop=["pq"]))).json()
        assert [c["text"] for c in answer["choices"]] == ["abcdefgh", "ijkl", "mno", "", "yz"]
        (leg,) = running.decode.requests
        assert running.decode.aborted_choices == [(leg.request_id, 2)]
        assert running.decode.aborted == []
        assert answer["usage"]["completion_tokens"] == 9 + 5 + 5 + 1 + 3


async def test_stop_string_in_a_first_token_aborts_that_choice_alone() -> None:
    async with choices_bench() as running, running.client() as client:
        answer = (await client.post("/v1/completions", json=body(stop=["i"]))).json()
        assert [c["text"] for c in answer["choices"]] == ["abcdefgh", "", "mnopqrstuvwx", "", "yz"]
        assert [index for _, index in running.decode.aborted_choices] == [1]


async def test_stop_strings_of_all_choices_end_the_request() -> None:
    async with choices_bench() as running, running.client() as client:
        answer = (await client.post("/v1/completions", json=body(n=3, stop=["c", "k", "o"]))).json()
        assert [c["text"] for c in answer["choices"]] == ["ab", "ij", "mn"]
        assert len(running.decode.aborted) == 1  # with the last choice the whole request


async def test_group_whose_decode_worker_dies_before_its_first_delta_stays_together() -> None:
    async with choices_bench(num_decode=2) as running:
        first, second = running.workers(Role.DECODE)
        first.is_reading = second.is_reading = True
        task = asyncio.create_task(texts_of(running, request(running)))
        await running.until(lambda: bool(first.num_first_tokens or second.num_first_tokens))
        used, other = (first, second) if first.requests else (second, first)
        other.is_reading = False
        used.kill()
        assert await task == list(TEXTS)
        assert [(leg.n, leg.output_token_ids) for leg in other.requests] == [(5, ())]
        assert other.num_first_tokens == [4]
        assert len(running.prefill.requests) == 1


@pytest.mark.parametrize("num_before", [1, 2, 3, 4, 7, 11])
async def test_choices_go_on_one_by_one_when_their_decode_worker_dies(num_before: int) -> None:
    async with choices_bench(num_decode=2) as running:
        first, second = running.workers(Role.DECODE)
        for worker in (first, second):
            worker.num_until_pause = num_before
        task = asyncio.create_task(texts_of(running, request(running)))
        await running.until(lambda: bool(first.requests or second.requests))
        used, other = (first, second) if first.requests else (second, first)
        await running.until(lambda: used.num_until_pause == 0)
        other.num_until_pause = None
        used.kill()
        assert await task == list(TEXTS)
        unfinished = [index for index, text in enumerate(TEXTS) if len(text) > num_before]
        resumed = {leg.index: leg for leg in running.prefill.requests[1:]}
        assert sorted(resumed) == unfinished
        for index, leg in resumed.items():
            assert (leg.n, leg.sampling.seed) == (1, choice_seed(SEED, index))
            told = TEXTS[index][: num_before + 1]
            assert running.tokenizer.decode(leg.output_token_ids) == told
        assert len({leg.request_id for leg in running.prefill.requests}) == 1 + len(unfinished)


async def test_group_that_nobody_has_heard_of_yet_is_tried_again_as_a_group() -> None:
    async with choices_bench(num_prefill=2, local_prefill_on_failure=False) as running:
        for worker in running.workers(Role.PREFILL):
            worker.failures = [LeaseExpired("restarting")]
        assert await texts_of(running, request(running)) == list(TEXTS)
        legs = [leg for worker in running.workers(Role.PREFILL) for leg in worker.requests]
        assert [leg.n for leg in legs] == [5, 5, 5]


async def test_ticket_that_nobody_can_take_lets_the_choices_go_on_one_by_one() -> None:
    async with choices_bench() as running:
        running.prefill.num_until_pause = 0
        task = asyncio.create_task(texts_of(running, request(running)))
        await running.until(lambda: bool(running.prefill.running))
        running.decode.kill()
        running.prefill.resume()
        await running.until(lambda: bool(running.prefill.released))
        running.cluster.add_worker(Role.DECODE)
        assert await task == list(TEXTS)


async def test_choice_that_was_dropped_is_not_resumed() -> None:
    async with choices_bench(num_decode=2) as running:
        task = asyncio.create_task(_all_but_the_third(running))
        await running.until(lambda: any(w.aborted_choices for w in running.workers(Role.DECODE)))
        await running.until(lambda: any(w.num_until_pause == 0 for w in running.workers(Role.DECODE)))
        used = next(w for w in running.workers(Role.DECODE) if w.requests)
        other = next(w for w in running.workers(Role.DECODE) if not w.requests)
        used.kill()
        other.resume()
        assert await task == {0, 1, 3, 4}
        assert sorted(leg.index for leg in other.requests) == [0, 1, 4]


async def _all_but_the_third(running: Bench) -> set[int]:
    """Drop choice 2 at its first token; returns which choices ended."""
    for worker in running.workers(Role.DECODE):
        worker.num_until_pause = 1
    ended = set()
    async with aclosing(running.router.orchestrator.generate(request(running))) as deltas:
        async for delta in deltas:
            assert delta.index != 2 or not delta.finish_reason
            deltas.drop(2)
            if delta.finish_reason is not None:
                ended.add(delta.index)
    return ended


async def test_choice_can_be_dropped_while_it_goes_on_by_itself() -> None:
    async with choices_bench() as running:
        running.decode.num_until_pause = 1
        deltas = running.router.orchestrator.generate(request(running))
        async with aclosing(deltas):
            for _ in range(5 + 1):
                await anext(deltas)
            await running.until(lambda: running.decode.num_until_pause == 0)
            running.decode.kill()
            replacement = running.cluster.add_worker(Role.DECODE)
            replacement.num_until_pause = 0
            received = asyncio.create_task(_collect(deltas))
            # The last choice ends with the token that its prefill worker samples.
            await running.until(lambda: len(replacement.requests) == 4 and len(replacement.running) == 3)
            deltas.drop(0)
            await running.until(lambda: len(replacement.running) == 2)
            assert "/0" in replacement.aborted[-1]
            replacement.resume()
            assert await received == {1, 2, 4}


async def _collect(deltas: Any) -> set[int]:
    return {delta.index async for delta in deltas if delta.finish_reason is not None}


async def test_failure_of_one_resumed_choice_ends_the_request_and_leaves_nothing() -> None:
    async with choices_bench() as running:
        running.decode.num_until_pause = 1
        task = asyncio.create_task(texts_of(running, request(running)))
        await running.until(lambda: running.decode.num_until_pause == 0)
        running.prefill.failures = [InvalidRequest("no more")]
        running.decode.kill()
        running.cluster.add_worker(Role.DECODE)
        with pytest.raises(InvalidRequest, match="no more"):
            await task


@pytest.mark.parametrize("ends_by", ["close", "deadline"])
async def test_end_of_a_parted_request_aborts_every_choice(ends_by: str) -> None:
    async with choices_bench() as running:
        running.decode.num_until_pause = 1
        deadline_s = 0.5 if ends_by == "deadline" else 30.0
        task = asyncio.create_task(texts_of(running, request(running, deadline_s=deadline_s)))
        await running.until(lambda: running.decode.num_until_pause == 0)
        running.decode.kill()
        replacement = running.cluster.add_worker(Role.DECODE)
        replacement.num_until_pause = 0
        # "yz" ends with the token that its prefill worker samples.
        await running.until(lambda: len(replacement.requests) == 4 and len(replacement.running) == 3)
        if ends_by == "close":
            task.cancel()
        with pytest.raises((asyncio.CancelledError, DeadlineExceeded)):
            await task
        assert replacement.running == []
        assert len(replacement.aborted) == 4


async def test_answer_with_the_wrong_choices_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    async with choices_bench(num_retries=0) as running:
        running.prefill.answers_with = lambda asked: replace(asked, n=asked.n - 1)
        with pytest.raises(EngineFault):
            await texts_of(running, request(running))
        assert "choices [0, 1, 2, 3] of 5" in caplog.text
        assert running.prefill.released == running.prefill.tickets


async def test_chaos_loses_and_repeats_no_token_of_any_choice() -> None:
    """Workers die in turn under load, and are replaced; every client gets the undisturbed texts."""
    order = random.Random(5)
    async with choices_bench(num_prefill=2, num_decode=2, num_retries=20) as running:
        tasks = [asyncio.create_task(texts_of(running, request(running))) for _ in range(8)]
        for _ in range(5):
            for _ in range(order.randrange(1, 12)):
                await asyncio.sleep(0)
            role = order.choice(list(Role))
            running.cluster.add_worker(role)
            victim = next(w for w in running.workers(role) if w.is_alive)
            victim.kill()
            running.cluster.forget(victim)
            await running.all_usable()
        try:
            assert await asyncio.gather(*tasks) == [list(TEXTS)] * 8
        except SplitserveError as error:  # pragma: no cover
            pytest.fail(f"a client saw {error!r}")
