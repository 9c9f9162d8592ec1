"""Workers of several ranks as processes: when any rank is killed the worker is replaced, and no answer is
wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tiny_clusters import tiny_config, tiny_model

from cluster.processes import ProcessCluster
from rpc import wait_until

NUM_CLIENTS = 4


async def complete(client: httpx.AsyncClient, number: int) -> list[int]:
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": [3 + (number * 31 + i * i) % 256 for i in range(150)],
        "max_tokens": 32,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    token_ids: list[int] = reply.json()["choices"][0]["token_ids"]
    return token_ids


def follower_of(cluster: ProcessCluster, name: str) -> psutil.Process:
    (follower,) = psutil.Process(cluster.process(name).pid).children()
    return follower


@pytest.mark.nixl
@pytest.mark.timeout(300)
async def test_a_worker_whose_follower_was_killed_is_replaced_and_no_answer_is_wrong(
    tmp_path: Path,
) -> None:
    config = tiny_config(
        tiny_model("qwen2", tmp_path),
        prefill__tensor_parallel_size=2,
        decode__tensor_parallel_size=2,
        enable_prefix_caching=False,
    )
    followers: list[psutil.Process] = []
    async with (
        ProcessCluster(config, log_dir=tmp_path) as cluster,
        cluster.http() as url,
        httpx.AsyncClient(base_url=url, timeout=120) as client,
    ):
        expected = [await complete(client, number) for number in range(NUM_CLIENTS)]

        num_answers = [0] * NUM_CLIENTS
        enough = asyncio.Event()

        async def keep_asking(number: int) -> None:
            while not enough.is_set():
                assert await complete(client, number) == expected[number]
                num_answers[number] += 1

        async def until_all_are_answered() -> None:
            """Twice, so once from beginning to end."""
            before = list(num_answers)
            assert await wait_until(
                lambda: all(now >= then + 2 for now, then in zip(num_answers, before, strict=True)), 90
            )

        async with asyncio.TaskGroup() as clients:
            for number in range(NUM_CLIENTS):
                clients.create_task(keep_asking(number))
            for name in ("decode-0", "prefill-0"):
                victim = cluster.process(name)
                followers.append(follower_of(cluster, name))
                followers[-1].kill()
                successor = await cluster.wait_until_replaced(victim, timeout_s=90)
                assert "lost its group" in successor.ended_because
                followers.append(follower_of(cluster, name))
                # A request that two engines broke over would be given up, whoever's fault it was.
                await until_all_are_answered()
            enough.set()
        await cluster.wait_until_idle(timeout_s=30)
    assert not [process for process in followers if process.is_running()]
