"""Workers that are drained under load lose no request, and none of its tokens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_clusters import tiny_config, tiny_model

from cluster.admin import describe_worker, drain_worker
from cluster.local import LocalCluster
from protocol.errors import EngineFault
from rpc import wait_until

NUM_REQUESTS = 60
MAX_CONCURRENT = 10


class Loaded:
    """A cluster of two workers of each role, and a client of it."""

    def __init__(self, cluster: LocalCluster, url: str, client: httpx.AsyncClient) -> None:
        self.cluster = cluster
        self._url = url
        self._client = client
        self._gate = asyncio.Semaphore(MAX_CONCURRENT)

    async def ask(self, number: int) -> list[int]:
        """The tokens of a request that is the same whenever it is asked."""
        rng = random.Random(number)
        body = {
            "model": "tiny",
            "prompt": [3 + rng.randrange(250) for _ in range(rng.choice((5, 40, 130, 300)))],
            "max_tokens": rng.choice((5, 30, 80)),
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
        }
        async with self._gate:
            response = await self._client.post(f"{self._url}/v1/completions", json=body)
        assert response.status_code == 200, response.text
        choice: dict[str, Any] = response.json()["choices"][0]
        tokens: list[int] = choice["token_ids"]
        assert len(tokens) == body["max_tokens"]
        return tokens

    async def ask_all(self) -> list[list[int]]:
        return list(await asyncio.gather(*map(self.ask, range(NUM_REQUESTS))))


@pytest.fixture
async def loaded(tmp_path: Path) -> AsyncIterator[Loaded]:
    config = tiny_config(
        tiny_model("smollm2", tmp_path),
        prefill__num_workers=2,
        decode__num_workers=2,
        kv_transfer__checksum=True,
    )
    async with (
        LocalCluster(config) as cluster,
        cluster.http() as url,
        httpx.AsyncClient(timeout=60) as client,
    ):
        yield Loaded(cluster, url, client)


@pytest.mark.nixl
@pytest.mark.parametrize("limit_s", [30.0, 0.0], ids=["which end their work", "which hand it back"])
async def test_no_request_is_lost_when_one_worker_of_each_role_is_drained(
    loaded: Loaded, limit_s: float
) -> None:
    cluster = loaded.cluster
    undisturbed = await loaded.ask_all()
    load = asyncio.create_task(loaded.ask_all())
    for worker in (cluster.decode_workers[0], cluster.prefill_workers[0]):
        assert await wait_until(lambda worker=worker: worker.record().load.num_running > 0, 30)
        address = worker.record().address
        await drain_worker(address, cluster.token, limit_s)
        await drain_worker(address, cluster.token, limit_s)
        assert (await describe_worker(address, cluster.token)).draining
    assert await load == undisturbed
    for worker in (cluster.decode_workers[0], cluster.prefill_workers[0]):
        assert await wait_until(lambda worker=worker: fault(worker) is not None, 30)
        assert "to be replaced" in (fault(worker) or "")
    assert await loaded.ask(1) == undisturbed[1]
    await cluster.wait_until_idle(timeout_s=15)


def fault(worker: Any) -> str | None:
    try:
        worker.check_health()
    except EngineFault as error:
        return error.message
    return None
