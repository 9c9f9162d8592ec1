"""Several prompts in one completion request: each is answered as if it were alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from router_kit import MODEL, Bench, bench, byte_level_tokenizer

from protocol.errors import EngineFault
from protocol.generation import GenerationRequest, Receipt, choice_seed
from router.openai.completions import MAX_PROMPTS

SEED = 5
PROMPTS = ["one", "two", "three"]


def answer_of(prompt: str, index: int) -> str:
    return f"{prompt} {'xyz'[index]}"


async def complete(running: Bench, **fields: Any) -> Any:
    body = {"model": MODEL, "max_tokens": 50, "seed": SEED} | fields
    async with running.client() as client:
        return await client.post("/v1/completions", json=body)


def texts(num_choices: int) -> Callable[[GenerationRequest], str]:
    """Answers with the prompt and the choice, which is known by its seed."""
    tokenizer = byte_level_tokenizer()
    by_seed = {choice_seed(SEED, index): index for index in range(num_choices)}

    def text(request: GenerationRequest) -> str:
        return answer_of(tokenizer.decode(request.prompt_token_ids), by_seed.get(request.sampling.seed, 0))

    return text


async def test_choices_are_numbered_prompt_by_prompt_and_usage_is_of_all() -> None:
    async with bench(texts=texts(2)) as running:
        answer = (await complete(running, prompt=PROMPTS, n=2)).json()
        alone = [(await complete(running, prompt=prompt, n=2)).json()["usage"] for prompt in PROMPTS]
        tokens = [list(running.tokenizer.encode(prompt, True)) for prompt in PROMPTS]
        same = (await complete(running, prompt=tokens, n=2)).json()
    expected = [answer_of(prompt, index) for prompt in PROMPTS for index in range(2)]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["text"] for choice in same["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum(usage[name] for usage in alone)


async def test_a_stream_mixes_all_choices_and_ends_once() -> None:
    async with bench(texts=texts(1)) as running:
        options = {"include_usage": True}
        reply = await complete(running, prompt=PROMPTS, stream=True, stream_options=options)
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    found = ["", "", ""]
    *chunks, last = map(json.loads, lines)
    for chunk in chunks:
        (choice,) = chunk["choices"]
        found[choice["index"]] += choice["text"]
    assert found == [answer_of(prompt, 0) for prompt in PROMPTS]
    assert last["usage"]["prompt_tokens"] > len(PROMPTS)


async def test_echo_gives_each_choice_its_own_prompt() -> None:
    async with bench() as running:
        answer = (await complete(running, prompt=PROMPTS, echo=True, max_tokens=0)).json()
    assert [choice["text"] for choice in answer["choices"]] == PROMPTS


async def test_one_prompt_that_fails_fails_the_request_and_leaves_nothing_behind() -> None:
    """`bench` looks for leftovers at its end."""
    async with bench(num_retries=0) as running:
        running.prefill.failures = [EngineFault("broken")]
        assert (await complete(running, prompt=PROMPTS)).status_code == 500


@pytest.mark.parametrize("prompt", [["a", 1], ["a", []], [[1], "x", None], ["x"] * (MAX_PROMPTS + 1)])
async def test_a_bad_list_of_prompts_is_refused(prompt: Any) -> None:
    async with bench() as running:
        answer = await complete(running, prompt=prompt)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


async def test_queue_time_is_the_routers_and_both_engines() -> None:
    async with bench() as running:
        running.prefill.receipt = Receipt(prefill_queue_s=2.0)
        running.decode.receipt = Receipt(decode_queue_s=1.5, fetched_bytes=1)
        await complete(running, prompt="one")
        async with running.client() as client:
            page = (await client.get("/metrics")).text
    samples = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert 3.5 <= float(samples["splitserve_request_queue_time_seconds_sum"]) < 4.5
    assert float(samples["splitserve_request_router_queue_time_seconds_sum"]) < 1.0
