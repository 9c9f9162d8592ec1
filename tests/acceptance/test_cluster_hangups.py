"""Clients that hang up at random moments cost nothing but their own answers."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
import pytest
from tiny_clusters import tiny_config, tiny_model

from cluster.local import LocalCluster

NUM_REQUESTS = 200
SHARE_HANGING_UP = 0.3
MAX_CONCURRENT = 24


async def ask(client: httpx.AsyncClient, url: str, rng: random.Random, gate: asyncio.Semaphore) -> str:
    """One request of random length; 30 % leave at a random moment. Says what became of it."""
    body = {
        "model": "tiny",
        "prompt": [3 + rng.randrange(250) for _ in range(rng.choice((1, 16, 40, 130, 300)))],
        "max_tokens": rng.choice((1, 5, 30, 80)),
        "ignore_eos": True,
        "stream": rng.random() < 0.5,
        "seed": rng.randrange(2**32),
    }
    patience_s = rng.random() * 0.4 if rng.random() < SHARE_HANGING_UP else None
    async with gate:
        try:
            async with asyncio.timeout(patience_s):
                response = await client.post(f"{url}/v1/completions", json=body)
        except TimeoutError:
            return "hung up"
    assert response.status_code == 200, response.text
    return "answered"


@pytest.mark.nixl
async def test_both_pools_are_whole_after_clients_hung_up_at_random(tmp_path: Path) -> None:
    rng = random.Random(20)
    gate = asyncio.Semaphore(MAX_CONCURRENT)
    async with LocalCluster(tiny_config(tiny_model("smollm2", tmp_path))) as cluster, cluster.http() as url:
        async with httpx.AsyncClient(timeout=60) as client:
            outcomes = await asyncio.gather(
                *(ask(client, url, random.Random(rng.random()), gate) for _ in range(NUM_REQUESTS))
            )
            await cluster.wait_until_idle(timeout_s=15)
            assert await ask(client, url, random.Random(0), gate) == "answered"
        assert outcomes.count("answered") >= NUM_REQUESTS * (1 - SHARE_HANGING_UP) * 0.8
        assert outcomes.count("hung up") > 10
        await cluster.wait_until_idle(timeout_s=15)
