"""A cluster whose pools differ in block size or number type, or where things go wrong as configured."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_clusters import tiny_config, tiny_model

from cluster.local import LocalCluster

BODY = {
    "model": "tiny",
    "prompt": list(range(5, 105)),
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


@asynccontextmanager
async def served(model: Path, **settings: Any) -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient]]:
    config = tiny_config(model, **settings)
    async with (
        LocalCluster(config) as cluster,
        cluster.http() as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        yield cluster, http


async def answer(http: httpx.AsyncClient) -> list[int]:
    reply = await http.post("/v1/completions", json=BODY, timeout=60)
    assert reply.status_code == 200, reply.text
    return list(reply.json()["choices"][0]["token_ids"])


async def transferred_bytes(http: httpx.AsyncClient) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    of_transfers = [line for line in lines if line.startswith("splitserve_kv_transfer_bytes_total")]
    assert of_transfers
    return sum(float(line.split()[-1]) for line in of_transfers)


@pytest.mark.nixl
@pytest.mark.parametrize(("of_prefill", "of_decode"), [(8, 32), (32, 8)])
async def test_pools_of_unequal_block_size_give_the_tokens_of_equal_ones(
    model: Path, of_prefill: int, of_decode: int
) -> None:
    async with served(model) as (_, http):
        equal = await answer(http)
    sizes = {"prefill__block_size": of_prefill, "decode__block_size": of_decode}
    async with served(model, **sizes) as (cluster, http):
        assert await answer(http) == equal
        assert await transferred_bytes(http) > 0
        await cluster.wait_until_idle(timeout_s=15)


@pytest.mark.nixl
@pytest.mark.parametrize(("of_prefill", "of_decode"), [("float32", "bfloat16"), ("bfloat16", "float32")])
async def test_pools_of_unequal_number_type_hand_over(model: Path, of_prefill: str, of_decode: str) -> None:
    dtypes = {"prefill__dtype": of_prefill, "decode__dtype": of_decode}
    async with served(model, **dtypes) as (cluster, http):
        assert len(await answer(http)) == BODY["max_tokens"]
        assert await transferred_bytes(http) > 0
        await cluster.wait_until_idle(timeout_s=15)


@pytest.mark.nixl
async def test_answers_are_right_though_reads_and_calls_go_wrong_as_configured(model: Path) -> None:
    async with served(model) as (_, http):
        undisturbed = await answer(http)
    faults = {
        "faults__reads": {"fail": 0.3, "refuse": 0.2, "bit_flip": 0.4},
        "faults__calls": {"Release": {"lose_reply": 0.2, "duplicate": 0.3}, "Renew": {"disconnect": 0.2}},
        "kv_transfer__checksum": True,
        "enable_prefix_caching": False,
    }
    async with served(model, **faults) as (cluster, http):
        assert [await answer(http) for _ in range(6)] == [undisturbed] * 6
        await cluster.wait_until_idle(timeout_s=15)
