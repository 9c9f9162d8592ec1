"""Echo, scores of prompts, scoring without output, and bad words."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from openai import AsyncOpenAI
from router_kit import MODEL, Bench, bench, byte_fallback_backend, byte_level_tokenizer

from router import Tokenizer

BOS = "<|bos|>"


async def completion(running: Bench, **more: Any) -> Any:
    async with running.client() as client:
        answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": "hello !"} | more)
        assert answer.status_code == 200, answer.text
        return answer.json()


async def test_echo_gives_the_prompt_before_every_choice() -> None:
    async with bench("xyz") as running:
        answer = await completion(running, echo=True, n=2)
        assert [choice["text"] for choice in answer["choices"]] == ["hello !xyz"] * 2
        assert answer["choices"][0]["logprobs"] is None
        assert running.prefill.requests[0].sampling.prompt_logprobs is None
        assert answer["usage"]["prompt_tokens"] == 4
        assert answer["usage"]["completion_tokens"] == 8


async def test_echo_of_token_ids_is_their_text() -> None:
    async with bench("xyz") as running:
        ids = running.tokenizer.encode("hello", True)
        answer = await completion(running, prompt=list(ids), echo=True, return_token_ids=True)
        assert answer["choices"][0]["text"] == "helloxyz"
        assert len(answer["choices"][0]["token_ids"]) == 4  # the output's


async def test_echo_with_logprobs_scores_the_prompt_and_null_stands_for_its_first_token() -> None:
    async with bench("xyz") as running:
        answer = await completion(running, echo=True, logprobs=1)
        assert running.prefill.requests[0].sampling.prompt_logprobs == 1
        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs["tokens"] == [BOS, "hello", " ", "!", "x", "y", "z", "<|eos|>"]
        assert logprobs["token_logprobs"] == [None, *[-0.25] * 3, *[-0.5] * 4]
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["top_logprobs"][1] == {"hello": -0.25}
        assert logprobs["text_offset"] == [0, 0, 5, 6, 7, 8, 9, 10]
        text = answer["choices"][0]["text"]
        assert [text[at] for at in logprobs["text_offset"][1:7]] == list("h !xyz")


async def test_logprobs_name_the_chosen_token_even_when_no_best_one_is_asked_for() -> None:
    async with bench("xyz") as running:
        logprobs = (await completion(running, logprobs=0))["choices"][0]["logprobs"]
        assert logprobs["top_logprobs"] == [{t: -0.5} for t in ("x", "y", "z", "<|eos|>")]


async def test_stream_echoes_the_prompt_in_the_first_chunk_of_a_choice() -> None:
    body = {"model": MODEL, "prompt": "hello !", "echo": True, "logprobs": 1, "stream": True, "n": 2}
    async with bench("xyz") as running, running.client() as client:
        text = (await client.post("/v1/completions", json=body)).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
    for index in range(2):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["text"] == "hello !"
        assert own[0]["logprobs"]["token_logprobs"] == [None, -0.25, -0.25, -0.25]
        assert "".join(choice["text"] for choice in own) == "hello !xyz"
        offsets = [at for choice in own for at in choice["logprobs"]["text_offset"]]
        assert offsets == [0, 0, 5, 6, 7, 8, 9, 10]


async def test_scoring_alone_gives_the_prompt_and_no_output() -> None:
    async with bench("xyz") as running, running.client() as client:
        answer = await completion(running, echo=True, logprobs=1, max_tokens=0, n=2)
        for choice in answer["choices"]:
            assert (choice["text"], choice["finish_reason"]) == ("hello !", "length")
            assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25, -0.25]
        assert answer["usage"]["completion_tokens"] == 0
        assert running.prefill.requests[0].sampling.max_tokens == 1
        assert running.decode.requests == []
        assert "splitserve_generation_tokens_total 0.0" in (await client.get("/metrics")).text


async def test_scoring_a_prompt_of_one_token_has_nothing_to_score() -> None:
    async with bench("xyz") as running:
        answer = await completion(
            running, prompt=[5], echo=True, logprobs=1, prompt_logprobs=1, max_tokens=0
        )
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None]
        assert answer["choices"][0]["prompt_logprobs"] == [None]


async def test_prompt_logprobs_come_in_vllm_s_form() -> None:
    async with bench("xyz") as running:
        ids = running.tokenizer.encode("hello !", True)
        answer = await completion(running, prompt_logprobs=2, logprobs=1, echo=True)
        assert running.prefill.requests[0].sampling.prompt_logprobs == 2
        choice = answer["choices"][0]
        assert choice["prompt_logprobs"][0] is None
        assert choice["prompt_logprobs"][1] == {
            str(ids[1]): {"logprob": -0.25, "rank": 1, "decoded_token": "hello"},
            "0": {"logprob": -2.0, "rank": 2, "decoded_token": "!"},
        }
        assert len(choice["prompt_logprobs"]) == len(ids)
        assert choice["logprobs"]["top_logprobs"][1] == {"hello": -0.25}  # one was asked for
        bare = await completion(running, prompt_logprobs=0)
        assert bare["choices"][0]["text"] == "xyz"
        assert bare["choices"][0]["prompt_logprobs"][1] == {
            str(ids[1]): {"logprob": -0.25, "rank": None, "decoded_token": "hello"}
        }


async def test_prompt_logprobs_of_a_chat_stand_beside_its_choices() -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 1, "n": 2}
    async with bench() as running, running.client() as client:
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        assert len(answer["prompt_logprobs"]) == len(running.prefill.requests[0].prompt_token_ids)
        assert answer["prompt_logprobs"][0] is None
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["hello world"] * 2


async def test_resumed_request_does_not_score_its_prompt_again() -> None:
    async with bench("hello world", num_decode=1) as running, running.client() as client:
        running.decode.num_until_pause = 2
        body = {"model": MODEL, "prompt": "hello !", "prompt_logprobs": 1}
        task = asyncio.create_task(client.post("/v1/completions", json=body))
        await running.until(lambda: running.decode.num_until_pause == 0)
        running.decode.kill()
        running.cluster.add_worker(running.decode.record.role)
        answer = (await task).json()
        assert answer["choices"][0]["text"] == "hello world"
        assert len(answer["choices"][0]["prompt_logprobs"]) == 4
        asked = [request.sampling.prompt_logprobs for request in running.prefill.requests]
        assert asked == [1, None]


async def test_scores_of_other_tokens_are_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    async with bench(num_retries=0) as running, running.client() as client:
        running.prefill.answers_with = lambda request: replace(request, prompt_token_ids=(1, 2))
        body = {"model": MODEL, "prompt": "hello !", "prompt_logprobs": 1}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 500
        assert "other tokens" in caplog.text
        assert running.prefill.released == running.prefill.tickets


async def test_openai_s_client_reads_echo_and_scores() -> None:
    async with bench("xyz") as running:
        client = AsyncOpenAI(
            base_url="http://router/v1", api_key="none", http_client=running.client(), max_retries=0
        )
        async with client:
            answer = await client.completions.create(
                model=MODEL, prompt="hello !", echo=True, logprobs=1, max_tokens=0
            )
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None
            assert logprobs.token_logprobs is not None
            assert logprobs.token_logprobs[1:] == [-0.25] * 3


async def test_bad_words_are_banned_at_the_beginning_and_after_a_space() -> None:
    async with bench() as running:
        encode = running.tokenizer.encode
        await completion(running, bad_words=["world", " hello", "world"])
        assert running.prefill.requests[0].sampling.bad_words == (
            encode("world", False),
            encode(" world", False),
            encode("hello", False),
            encode(" hello", False),
        )
        assert running.decode.requests[0].sampling.bad_words == (
            running.prefill.requests[0].sampling.bad_words
        )


@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer(), Tokenizer(byte_fallback_backend())])
def test_bad_word_is_spelled_in_every_way_that_differs(tokenizer: Tokenizer) -> None:
    spellings = tokenizer.encode_bad_word("  world")
    assert spellings == [tokenizer.encode("world", False), tokenizer.encode(" world", False)]
    assert all(tokenizer.decode(ids).strip() == "world" for ids in spellings)


async def test_priority_and_salt_reach_both_workers() -> None:
    async with bench() as running:
        await completion(running, priority=-3, cache_salt="tenant")
        for worker in (running.prefill, running.decode):
            request = worker.requests[0]
            assert (request.priority, request.cache_salt) == (-3, "tenant")


async def test_more_scores_than_a_message_can_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.openai.prepare.MAX_PROMPT_SCORES", 11)
    async with bench("xyz") as running, running.client() as client:
        for body, status in (({"echo": True, "logprobs": 1}, 200), ({"prompt_logprobs": 2}, 400)):
            answer = await client.post("/v1/completions", json=body | {"model": MODEL, "prompt": "hello !"})
            assert answer.status_code == status
        assert answer.json()["error"]["param"] == "prompt_logprobs"
