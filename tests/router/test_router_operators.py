"""What operators do: forget cached prefixes everywhere. And what clients see of a full worker."""

from __future__ import annotations

from typing import Any

import pytest
from router_kit import MODEL, bench

from protocol.errors import Overloaded
from protocol.ids import Role

PATH = "/reset_prefix_cache"
TEXT = {"model": MODEL, "prompt": "hi"}


async def test_everything_is_forgotten_by_every_worker_of_both_roles() -> None:
    async with bench(num_prefill=2, num_decode=2) as running, running.client() as client:
        for content in (b"", b"{}", b'{"prompt": null}'):
            answer = await client.post(PATH, content=content)
            assert answer.status_code == 200
            assert answer.json()["status"] == "ok"
        reached = [(w["worker_id"], w["role"], w["error"]) for w in answer.json()["workers"]]
        assert reached == [
            ("prefill-1", "prefill", None),
            ("prefill-2", "prefill", None),
            ("decode-3", "decode", None),
            ("decode-4", "decode", None),
        ]
        for worker in running.cluster.workers_by_identity.values():
            assert [(c.everything, list(c.token_ids)) for c in worker.invalidated] == [(True, [])] * 3


async def test_one_prompt_is_forgotten_by_its_tokens_and_salt() -> None:
    async with bench() as running, running.client() as client:
        ids = running.tokenizer.encode("hello", True)
        bodies: list[dict[str, Any]] = [
            {"prompt": "hello"},
            {"prompt": list(ids), "cache_salt": "tenant"},
            {"prompt": "hello", "add_special_tokens": False},
        ]
        for body in bodies:
            assert (await client.post(PATH, json=body)).status_code == 200
        for worker in (running.prefill, running.decode):
            commands = [(c.everything, tuple(c.token_ids), c.cache_salt) for c in worker.invalidated]
            assert commands == [(False, ids, ""), (False, ids, "tenant"), (False, ids[1:], "")]


async def test_worker_that_is_not_reached_is_named() -> None:
    async with bench(num_decode=2) as running, running.client() as client:
        running.workers(Role.DECODE)[1].kill()
        answer = await client.post(PATH)
        assert answer.status_code == 503
        assert answer.json()["status"] == "incomplete"
        errors = {w["worker_id"]: w["error"] for w in answer.json()["workers"]}
        assert errors["prefill-1"] is errors["decode-2"] is None
        assert "does not answer" in errors["decode-3"]


async def test_worker_that_hangs_is_named_in_bounded_time() -> None:
    async with bench(admin_timeout_s=0.02) as running, running.client() as client:
        running.decode.is_deaf = True
        answer = await client.post(PATH)
        assert answer.status_code == 503
        assert "did not answer within 0.02 s" in answer.json()["workers"][1]["error"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"cache_salt": "x"}, "cache_salt"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt"),
        ({"everything": True}, "everything"),
    ],
)
async def test_bad_bodies_forget_nothing(body: dict[str, Any], param: str) -> None:
    async with bench() as running, running.client() as client:
        answer = await client.post(PATH, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert running.prefill.invalidated == []


async def test_reset_needs_the_api_key_when_there_is_one() -> None:
    async with bench(api_key="k3y") as running, running.client() as client:
        assert (await client.post(PATH)).status_code == 401
        assert running.prefill.invalidated == []
        assert (await client.post(PATH, headers={"authorization": "Bearer k3y"})).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_full_workers_are_told_to_the_client_with_a_time_to_come_back(
    path: str, stream: bool
) -> None:
    body = TEXT | {"stream": stream, "messages": [{"role": "user", "content": "hi"}]}
    body.pop("prompt" if "chat" in path else "messages")
    async with bench() as running, running.client() as client:
        running.prefill.failures = [Overloaded("64 sequences wait already", retry_after_s=2.2)]
        answer = await client.post(path, json=body)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "3"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert "wait already" in answer.json()["error"]["message"]
        assert len(running.prefill.requests) == 1


async def test_full_decode_worker_is_waited_for_because_the_client_has_a_token() -> None:
    async with bench() as running, running.client() as client:
        running.decode.failures = [Overloaded("full", retry_after_s=0.01)]
        answer = await client.post("/v1/completions", json=TEXT)
        assert answer.json()["choices"][0]["text"] == "hello world"
        assert len(running.decode.requests) == 2
