"""OpenAI's API over scripted workers: answers, streams, usage and operators' routes."""

from __future__ import annotations

import itertools
import json
import logging
from typing import Any

import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI
from router_kit import MAX_MODEL_LEN, MODEL, Bench, bench

from protocol.errors import EngineFault, LayoutMismatch
from protocol.generation import Receipt
from protocol.ids import Role
from protocol.membership import Load

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


def openai_client(running: Bench, api_key: str = "none") -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url="http://router/v1", api_key=api_key, http_client=running.client(), max_retries=0
    )


def events(body: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    return [json.loads(line) if line != "[DONE]" else line for line in lines]


async def test_chat_answers_with_text_usage_and_finish_reason() -> None:
    async with bench() as running, openai_client(running) as client:
        running.prefill.receipt = Receipt(num_cached_tokens=3)
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}]
        )
        assert answer.choices[0].message.content == "hello world"
        assert answer.choices[0].finish_reason == "stop"
        prompt = running.prefill.requests[0].prompt_token_ids
        assert running.tokenizer.backend.decode(list(prompt), skip_special_tokens=False) == (
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        )
        assert answer.usage is not None
        num_output = len(running.tokenizer.encode("hello world", False)) + 1
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), num_output)
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 3
        assert running.prefill.requests[0].sampling.max_tokens == MAX_MODEL_LEN - len(prompt)


async def test_chat_stream_gives_role_text_finish_and_usage() -> None:
    async with bench("h\u00e9llo \U0001f642!") as running, openai_client(running) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        assert "".join(texts) == "h\u00e9llo \U0001f642!"
        assert all("\ufffd" not in text for text in texts)
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert all(c.usage is None for c in chunks[:-1])
        assert len({c.id for c in chunks}) == 1


async def test_completion_defaults_to_16_tokens_and_adds_bos() -> None:
    async with bench("abcdefghijklmnopqrstuvwxyz") as running, openai_client(running) as client:
        answer = await client.completions.create(model=MODEL, prompt="hello")
        assert answer.choices[0].text == "abcdefghijklmnop"
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 16
        request = running.prefill.requests[0]
        assert request.prompt_token_ids[0] == running.tokenizer.backend.token_to_id("<|bos|>")
        assert len(request.prompt_token_ids) == 2


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
async def test_completion_takes_token_ids(prompt: Any) -> None:
    async with bench() as running, openai_client(running) as client:
        await client.completions.create(model=MODEL, prompt=prompt)
        assert running.prefill.requests[0].prompt_token_ids == (5, 6, 7)


async def test_one_token_never_reaches_a_decode_worker() -> None:
    async with bench() as running, openai_client(running) as client:
        answer = await client.completions.create(model=MODEL, prompt="x", max_tokens=1)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 1
        assert running.decode.requests == []


async def test_logprobs_of_chat_and_completion() -> None:
    async with bench("\u00e9!") as running, openai_client(running) as client:
        chat = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=1
        )
        assert chat.choices[0].logprobs is not None
        content = chat.choices[0].logprobs.content
        assert content is not None
        assert chat.usage is not None
        assert len(content) == chat.usage.completion_tokens == 4
        assert bytes(b for entry in content[:3] for b in entry.bytes or ()).decode() == "\u00e9!"
        assert content[2].top_logprobs[0].token == "!"  # noqa: S105
        text = await client.completions.create(model=MODEL, prompt="x", logprobs=1)
        logprobs = text.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs == [-0.5] * 4
        assert logprobs.text_offset == [0, 0, 1, 2]
        streamed = await client.completions.create(model=MODEL, prompt="x", logprobs=0, stream=True)
        pieces = [chunk.choices[0].logprobs async for chunk in streamed]
        assert sum(len(p.tokens or ()) for p in pieces if p) == 4


async def test_token_ids_come_back_when_asked_for() -> None:
    async with bench("hello") as running, running.client() as client:
        body = {"model": MODEL, "prompt": "x", "return_token_ids": True}
        answer = (await client.post("/v1/completions", json=body)).json()
        backend = running.tokenizer.backend
        assert answer["choices"][0]["token_ids"] == [
            backend.token_to_id("hello"),
            backend.token_to_id("<|eos|>"),
        ]


async def test_stop_string_ends_the_answer_and_aborts_at_the_decode_worker() -> None:
    async with bench("hello world and so on") as running, openai_client(running) as client:
        running.decode.num_until_pause = 8
        answer = await client.completions.create(
            model=MODEL, prompt="x", stop=["orl", "zzz"], max_tokens=100
        )
        assert answer.choices[0].text == "hello w"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5  # "hello", " w", "o", "r", "l"
        await running.until(lambda: not running.decode.running)
        assert len(running.decode.aborted) == 1


async def test_seed_is_drawn_or_taken_modulo_two_to_the_64() -> None:
    async with bench() as running, openai_client(running) as client:
        for seed in (None, None, 7, -1):
            await client.completions.create(model=MODEL, prompt="x", seed=seed)
        seeds = [request.sampling.seed for request in running.prefill.requests]
        assert seeds[0] != seeds[1]
        assert seeds[2:] == [7, 2**64 - 1]
        assert [r.sampling.seed for r in running.decode.requests] == seeds


async def test_error_before_the_first_token_has_a_status_even_for_streams() -> None:
    async with bench(num_retries=0) as running, running.client() as client:
        running.prefill.failures = [LayoutMismatch("boom", code="x")]
        answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
        assert answer.status_code == 500
        assert answer.json()["error"] == {
            "message": "boom",
            "type": "server_error",
            "param": None,
            "code": "x",
        }


async def test_error_after_the_first_token_is_an_event_and_no_done_follows() -> None:
    async with bench(num_retries=0) as running, running.client() as client:
        running.decode.failures = [LayoutMismatch("boom")]
        answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
        assert answer.status_code == 200
        received = events(answer.text)
        assert received[1]["choices"][0]["delta"]["content"] == "hello"
        assert received[-1]["error"]["message"] == "boom"


async def test_models_are_listed_by_their_served_name() -> None:
    async with bench() as running, openai_client(running) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(APIStatusError, match="does not exist here"):
            await client.models.retrieve("other")


async def test_api_key_guards_the_api_and_not_the_probes() -> None:
    async with bench(api_key="k3y") as running, running.client() as client:
        refused = await client.get("/v1/models")
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
        wrong = await client.get("/v1/models", headers={"authorization": b"Bearer k3\xff"})
        assert wrong.status_code == 401
        assert (await client.get("/v1/models", headers={"authorization": "Bearer k3y"})).status_code == 200
        assert (await client.get("/health")).status_code == 200


async def test_request_id_is_echoed_or_made() -> None:
    async with bench() as running, running.client() as client:
        made = await client.get("/health")
        assert made.headers["x-request-id"].startswith("req-")
        echoed = await client.post("/v1/nowhere", headers={"x-request-id": "mine-1"})
        assert (echoed.status_code, echoed.headers["x-request-id"]) == (404, "mine-1")
        strange = await client.get("/health", headers={"x-request-id": "a b"})
        assert strange.headers["x-request-id"].startswith("req-")


async def test_health_needs_a_usable_worker_of_each_role() -> None:
    async with bench() as running, running.client() as client:
        assert (await client.get("/health")).json()["status"] == "ok"
        running.decode.kill()
        answer = await client.get("/health")
        assert answer.status_code == 503
        assert answer.json() == {
            "status": "unavailable",
            "reason": "no usable decode worker",
            "prefill_workers": 1,
            "decode_workers": 0,
        }


async def test_ready_follows_the_canary_whose_requests_are_no_users() -> None:
    async with bench() as running, running.client() as client:
        await running.until(lambda: running.router.not_ready_because() is None)
        assert (await client.get("/ready")).status_code == 200
        assert running.decode.requests == []  # the bench has forgotten the canary's
        assert "splitserve_generation_tokens_total 0.0" in (await client.get("/metrics")).text
        running.prefill.kill()
        assert (await client.get("/ready")).json()["reason"] == "no usable prefill worker"


async def test_failing_handoffs_make_the_service_not_ready() -> None:
    async with bench(num_decode=0, num_retries=0) as running, running.client() as client:
        worker = running.cluster.add_worker(Role.DECODE)
        worker.failures = [LayoutMismatch("no way")] * 5
        await running.until(lambda: "failed" in (running.router.not_ready_because() or ""))
        answer: httpx.Response = await client.get("/ready")
        assert answer.status_code == 503
        assert answer.json()["reason"] == "the last hand-off failed: no way"


async def test_decode_worker_that_recomputes_everything_does_not_make_the_service_ready() -> None:
    """Its tokens are right, but no KV moved: every prompt would be computed twice."""
    async with bench(num_decode=0) as running, running.client() as client:
        worker = running.cluster.add_worker(Role.DECODE)
        worker.receipt = Receipt()
        await running.until(lambda: len(worker.tickets) == 1 and not worker.running)
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()["reason"]) == (503, "no hand-off yet")
        worker.receipt = Receipt(fetched_bytes=1)
        await running.until(lambda: running.router.not_ready_because() is None)


async def test_router_that_has_lost_a_part_is_unfit() -> None:
    async with bench() as running:
        running.router.check_health()
        running.cluster.error = ZeroDivisionError("oops")  # type: ignore[assignment]
        with pytest.raises(EngineFault, match="does not follow the directory"):
            await running.until(running.router.check_health)


async def test_metrics_merge_router_and_workers() -> None:
    page = "# HELP steps_total Steps\n# TYPE steps_total counter\nsteps_total 5.0\n"
    async with bench(num_decode=3) as running, openai_client(running) as client, running.client() as http:
        running.prefill.exposition = page
        for worker, exposition in zip(running.workers(Role.DECODE), (page, "{broken", ""), strict=True):
            worker.exposition = exposition
        await client.completions.create(model=MODEL, prompt="hello", max_tokens=3)
        text = (await http.get("/metrics")).text
        assert text.count("# TYPE steps_total counter") == 1
        assert 'steps_total{role="prefill",worker_id="prefill-1"} 5.0' in text
        assert 'steps_total{role="decode",worker_id="decode-2"} 5.0' in text
        assert "decode-3" not in text
        assert "decode-4" not in text
        assert 'splitserve_request_success_total{finished_reason="length"} 1.0' in text
        assert "splitserve_generation_tokens_total 3.0" in text
        assert "splitserve_prompt_tokens_total 2.0" in text
        assert "splitserve_time_to_first_token_seconds_count 1.0" in text
        assert "splitserve_inter_token_latency_seconds_count 2.0" in text
        assert 'splitserve_http_responses_total{path="/v1/completions",status="200"} 1.0' in text


async def test_handoff_that_had_no_turn_at_a_busy_worker_leaves_the_service_ready(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "router.canary")
    changes = {"canary_interval_s": 0.01, "canary_timeout_s": 0.02}
    async with bench(**changes) as running:
        router, worker = running.router, running.prefill
        worker.num_until_pause = 0
        await running.until(lambda: router.not_ready_because() is not None)  # nothing moves there
        assert all(request.priority == -(2**31) for request in worker.requests)
        layers = itertools.count(1)

        def is_ready_while_it_works() -> bool:
            """In one step that lasts: nothing else of its load changes."""
            worker.report(Load(num_running=1, num_waiting=3, progress=next(layers)))
            return router.not_ready_because() is None

        def levels() -> list[int]:
            return [record.levelno for record in caplog.records if record.name == "router.canary"]

        await running.until(is_ready_while_it_works)
        caplog.clear()
        await running.until(lambda: is_ready_while_it_works() and bool(levels()))
        assert set(levels()) == {logging.INFO}  # it alarms nobody
        await running.until(lambda: router.not_ready_because() is not None)  # it has stopped again
        worker.resume()


async def test_failed_handoff_counts_however_busy_the_worker_is() -> None:
    changes = {"canary_interval_s": 0.01, "canary_timeout_s": 0.02, "num_retries": 0}
    async with bench(**changes) as running:
        router, worker = running.router, running.decode
        worker.failures = [LayoutMismatch("no way")] * 1000
        layers = itertools.count(1)

        def is_unready_while_it_works() -> bool:
            worker.report(Load(num_running=1, progress=next(layers)))
            return router.not_ready_because() is not None

        await running.until(is_unready_while_it_works)
        worker.failures.clear()
