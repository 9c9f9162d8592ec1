"""Every bad request is refused with a 4xx of OpenAI's shape that names the field."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from router_kit import MAX_MODEL_LEN, MODEL, bench, byte_level_backend

from router import Tokenizer
from router.chat_template import ChatTemplate

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": MODEL, "prompt": "hi"}
BOTH: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 1.0}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.0}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": "x" * 1001}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"\u0663": 1}}, "logit_bias"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-30}, "repetition_penalty"),
    ({"repetition_penalty": 1e30}, "repetition_penalty"),
    ({"min_tokens": 1, "stop_token_ids": list(range(266))}, "stop_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"strange": 1}}, "stream_options.strange"),
    ({"priority": 2**31}, "priority"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": True}, "n"),
    ({"n": 2.0}, "n"),
    ({"best_of": 1}, "best_of"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": 2, "n": 2}, "best_of"),
    ({"bad_words": "x"}, "bad_words"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"bad_words": [5]}, "bad_words[0]"),
    ({"bad_words": ["x" * 257]}, "bad_words[0]"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"unheard_of": 1}, "unheard_of"),
]
CHAT_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"functions": [{}]}, "functions"),
    ({"audio": {}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"echo": True}, "echo"),
]
TEXT_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.0]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": "", "add_special_tokens": False}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": 1}, "echo"),
    ({"max_tokens": 0, "echo": False}, "max_tokens"),
    ({"max_tokens": 0, "prompt_logprobs": 1}, "max_tokens"),
    ({"suffix": "x"}, "suffix"),
    ({"messages": []}, "messages"),
]


async def test_bad_fields_are_refused_by_name() -> None:
    """One router for all cases; the list of those that went wrong is empty."""
    cases = [("/v1/chat/completions", CHAT | c, p) for c, p in [*BOTH, *CHAT_ONLY]]
    cases += [("/v1/completions", TEXT | c, p) for c, p in [*BOTH, *TEXT_ONLY]]
    wrong = []
    async with bench() as running, running.client() as client:
        for path, body, param in cases:
            answer = await client.post(path, json=body)
            error = answer.json().get("error", {})
            is_right = (answer.status_code, error.get("type"), error.get("param")) == (
                400,
                "invalid_request_error",
                param,
            )
            if not is_right or set(error) != {"message", "type", "param", "code"} or not error["message"]:
                wrong.append((path, body, answer.status_code, error))
        assert wrong == []
        assert running.prefill.requests == []


async def test_neutral_and_harmless_fields_are_accepted() -> None:
    harmless: dict[str, Any] = {
        "n": 1,
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "stop": None,
        "seed": None,
        "max_tokens": None,
        "logit_bias": {},
        "stream": False,
        "stream_options": None,
        "top_k": -1,
        "temperature": 1,
    }
    chat = harmless | {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "logprobs": False,
        "max_completion_tokens": 5,
        "messages": [
            {"role": "developer", "content": "x", "name": "n"},
            {"role": "assistant", "content": "y", "refusal": None, "tool_calls": [], "annotations": []},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
    }
    text = harmless | {"echo": False, "suffix": None, "prompt": ["hi"]}
    async with bench() as running, running.client() as client:
        assert (await client.post("/v1/chat/completions", json=CHAT | chat)).status_code == 200
        assert (await client.post("/v1/completions", json=TEXT | text)).status_code == 200
        prompt = running.tokenizer.backend.decode(
            list(running.prefill.requests[0].prompt_token_ids), skip_special_tokens=False
        )
        assert "<|im_start|>user\na\nb<|im_end|>" in prompt
        assert [r.sampling.max_tokens for r in running.prefill.requests] == [5, 16]
        assert running.prefill.requests[0].sampling.top_k == 0


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b'"x"', "invalid_json"),
        (b'{"model": "\xff"}', "invalid_utf8"),
        (b'{"model": "org/tiny", "prompt": "\\ud83d"}', "invalid_utf8"),
        (b'{"model": "org/tiny", "prompt": "x", "temperature": NaN}', "invalid_json"),
        (b'{"model": "org/tiny", "prompt": "x", "temperature": -Infinity}', "invalid_json"),
        (b'{"model": "org/tiny", "prompt": "x", "temperature": 1e999}', "invalid_value"),
        (b'{"model": "org/tiny", "prompt": "x", "seed": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b'{"a":' * 100_000, "invalid_json"),
        (b'{"model": "org/tiny"}', "missing_required_parameter"),
    ],
)
async def test_bad_bodies_are_refused(body: bytes, code: str) -> None:
    async with bench() as running, running.client() as client:
        answer = await client.post("/v1/completions", content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


async def test_surrogate_pairs_are_text() -> None:
    async with bench() as running, running.client() as client:
        body = b'{"model": "org/tiny", "prompt": "\\ud83d\\ude42"}'
        assert (await client.post("/v1/completions", content=body)).status_code == 200


async def test_unknown_model_is_not_found() -> None:
    async with bench() as running, running.client() as client:
        for path, body in (("chat/completions", CHAT), ("completions", TEXT)):
            answer = await client.post(f"/v1/{path}", json=body | {"model": "nope"})
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"
            assert answer.json()["error"]["param"] == "model"


async def test_context_bounds_prompt_and_output() -> None:
    async with bench() as running, running.client() as client:

        async def post(num_prompt: int, **fields: Any) -> tuple[int, str | None]:
            body = TEXT | {"prompt": [1] * num_prompt} | fields
            answer = (await client.post("/v1/completions", json=body)).json()
            return answer.get("error", {}).get("code", "ok"), answer.get("error", {}).get("param")

        assert await post(MAX_MODEL_LEN) == ("context_length_exceeded", None)
        assert await post(MAX_MODEL_LEN - 1, max_tokens=2) == ("context_length_exceeded", "max_tokens")
        assert await post(MAX_MODEL_LEN - 1, max_tokens=1) == ("ok", None)
        assert await post(MAX_MODEL_LEN - 5) == ("ok", None)
        assert [r.sampling.max_tokens for r in running.prefill.requests] == [1, 5]
        long_chat = CHAT | {"messages": [{"role": "user", "content": "x " * MAX_MODEL_LEN * 20}]}
        answer = await client.post("/v1/chat/completions", json=long_chat)
        assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_body_limit_holds_while_reading() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b"x" * 100
        raise AssertionError("the body was read to its end")

    async with bench(max_body_bytes=1000) as running, running.client() as client:
        answer = await client.post("/v1/completions", content=endless())
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
        declared = await client.post("/v1/completions", content=b"x" * 1001)
        assert declared.status_code == 413


async def test_unknown_paths_and_methods_have_the_same_error_shape() -> None:
    async with bench() as running, running.client() as client:
        missing = await client.get("/v1/nothing")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        wrong = await client.get("/v1/completions")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
        assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
async def test_bad_timeouts_are_refused(value: str) -> None:
    async with bench() as running, running.client() as client:
        answer = await client.post("/v1/completions", json=TEXT, headers={"x-request-timeout": value})
        assert answer.status_code == 400


async def test_timeout_of_a_request_is_at_most_the_server_s() -> None:
    async with bench(request_timeout_s=20.0) as running, running.client() as client:
        for value in ("5", "500"):
            await client.post("/v1/completions", json=TEXT, headers={"x-request-timeout": value})
        first, second = (r.deadline_s for r in running.prefill.requests)
        assert 0 < first <= 5 < second <= 20


async def test_deadline_is_a_504() -> None:
    async with bench() as running, running.client() as client:
        running.prefill.num_until_pause = 0
        answer = await client.post("/v1/completions", json=TEXT, headers={"x-request-timeout": "0.02"})
        assert answer.status_code == 504
        assert json.loads(answer.content)["error"]["type"] == "server_error"


async def test_full_router_says_429_and_when_to_come_back() -> None:
    async with (
        bench(max_in_flight=1, max_queued=0, retry_after_s=3.0) as running,
        running.client() as client,
    ):
        async with running.router.admission.place(0, 1.0):
            answer = await client.post("/v1/completions", json=TEXT)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "3"
        assert answer.json()["error"]["type"] == "rate_limit_error"


async def test_text_with_tokens_that_the_model_has_no_rows_for_is_refused() -> None:
    """They would break the engine, and with it the requests of all others."""
    async with bench() as running, running.client() as client:
        running.tokenizer.vocab_size = 5
        answer = await client.post("/v1/completions", json=TEXT)
        assert answer.status_code == 400
        assert "not in the vocabulary" in answer.json()["error"]["message"]


@pytest.mark.parametrize("field", ["content", "name", "reasoning_content"])
async def test_text_that_cannot_fit_is_refused_before_it_is_tokenised(field: str) -> None:
    class NoTokenizer:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} of a text that cannot fit")

    template = "{{ messages[0].content }}{{ messages[0].name }}{{ messages[0].reasoning_content }}"
    async with bench() as running, running.client() as client:
        tokenizer: Any = Tokenizer(byte_level_backend(), ChatTemplate(template, {}))
        tokenizer.backend = NoTokenizer()
        running.router.preparer = replace(running.router.preparer, tokenizer=tokenizer)
        long = "x" * (MAX_MODEL_LEN * tokenizer.longest_token + 1)
        message = {"role": "user", "content": "hi", field: long}
        answers = [
            await client.post("/v1/chat/completions", json=CHAT | {"messages": [message]}),
            await client.post("/v1/completions", json=TEXT | {"prompt": long}),
        ]
    for answer, param in zip(answers, ("messages", "prompt"), strict=True):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        TEXT | {"model": "m" * 100_000},
        TEXT | {"f" * 100_000: 1},
        TEXT | {"stream": True, "stream_options": {"f" * 100_000: 1}},
        TEXT | {"logit_bias": {"f" * 100_000: "x"}},
        TEXT | {"min_tokens": int("9" * 4000)},
        TEXT | {"max_tokens": int("9" * 4000)},
        TEXT | {"prompt": [int("9" * 4000)]},
    ],
)
async def test_errors_echo_little_of_what_a_client_sent(body: dict[str, Any]) -> None:
    async with bench() as running, running.client() as client:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code in {400, 404}
        assert len(answer.content) < 600


async def test_token_that_is_biased_twice_is_refused() -> None:
    async with bench() as running, running.client() as client:
        answer = await client.post("/v1/completions", json=TEXT | {"logit_bias": {"05": 1, "5": -1}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("tools", [{"type": "function"}], "tools are not supported"),
        ("response_format", {"type": "json_object"}, 'response_format: only {"type": "text"} is supported'),
        ("tool_choice", "required", 'tool_choice: only "none" or "auto" is supported'),
        ("length_penalty", 2, "length_penalty: only 1 is supported"),
        ("reasoning_effort", "low", "reasoning_effort is not supported"),
    ],
)
async def test_what_is_not_supported_is_refused_in_plain_words(field: str, value: Any, says: str) -> None:
    async with bench() as running, running.client() as client:
        answer = await client.post("/v1/chat/completions", json=CHAT | {field: value})
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, says)
