"""The demo model through the public API, as the `openai` client sees it, and what NIXL carried for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import openai
import pytest
from compiled_ops import cache_folder
from prometheus_client.parser import text_string_to_metric_families

from cluster.config import load_config
from cluster.local import LocalCluster

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
LONG_TEXT = "One two three four five six seven eight nine ten. " * 20


@dataclass
class Served:
    """A running demo cluster and a client of it."""

    cluster: LocalCluster
    url: str
    client: openai.AsyncOpenAI


@pytest.fixture
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    cache = cache_folder(tmp_path_factory.getbasetemp() / "demo")
    config = load_config(
        None,
        {"dtype": "float32", "cache_dir": str(cache), "http.port": 0, "prefill.kv_cache_memory": "384MiB"},
    )
    async with (
        LocalCluster(config) as cluster,
        cluster.http() as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Served(cluster, url, client)


async def metric(url: str, name: str) -> float:
    async with httpx.AsyncClient() as client:
        page = (await client.get(f"{url}/metrics")).text
    samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
    return sum(sample.value for sample in samples if sample.name == name)


@pytest.mark.model
@pytest.mark.nixl
@pytest.mark.timeout(300)
async def test_the_openai_client_gets_paris_and_the_bytes_went_over_nixl(served: Served) -> None:
    client, url = served.client, served.url
    whole = await client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, max_tokens=24
    )
    text = whole.choices[0].message.content
    assert "Paris" in text
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    stream = await client.chat.completions.create(
        model="demo",
        messages=QUESTION,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= 16, "the prompt was asked before"

    completion = await client.completions.create(
        model="demo", prompt="The capital of France is", temperature=0, max_tokens=8
    )
    assert "Paris" in completion.choices[0].text
    pieces = await client.completions.create(
        model="demo", prompt="The capital of France is", temperature=0, max_tokens=8, stream=True
    )
    assert "".join([p.choices[0].text async for p in pieces]) == completion.choices[0].text

    await served.cluster.wait_until_idle(timeout_s=10)
    blocks_before = await metric(url, "splitserve_kv_transfer_blocks_total")
    bytes_before = await metric(url, "splitserve_kv_transfer_bytes_total")
    long = await client.completions.create(model="demo", prompt=LONG_TEXT, temperature=0, max_tokens=4)
    num_blocks = await metric(url, "splitserve_kv_transfer_blocks_total") - blocks_before
    num_bytes = await metric(url, "splitserve_kv_transfer_bytes_total") - bytes_before
    block_bytes = 30 * 2 * 3 * 16 * 64 * 4  # layers, K and V, heads, tokens, head size, float32
    assert num_blocks == -(-long.usage.prompt_tokens // 16)
    assert num_bytes == num_blocks * block_bytes


@pytest.mark.model
@pytest.mark.nixl
@pytest.mark.timeout(300)
async def test_emoji_and_chinese_survive_streaming_in_any_split(served: Served) -> None:
    """Every piece is whole characters: what is streamed together equals the unstreamed text."""
    client = served.client
    ask = {
        "model": "demo",
        "prompt": "🌊🌙 灯台の明かりは 🌊🌙 灯台の明かりは 🌊🌙 灯台の",
        "max_tokens": 40,
        "temperature": 0.8,
        "seed": 7,
    }
    whole = await client.completions.create(**ask)
    pieces = [p.choices[0].text async for p in await client.completions.create(**ask, stream=True)]
    assert "".join(pieces) == whole.choices[0].text
    assert all("�" not in piece for piece in pieces[:-1])
