"""Cables between hosts are cut: a stream goes on within seconds with the right tokens; healed links serve.

Router and directory are on one host, every worker on one of its own; KV moves by NIXL over TCP.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from netns_hosts import Host, Network, network, obstacle
from tiny_clusters import tiny_config, tiny_model
from tiny_models import make_prompt

from cluster.compose import open_model
from cluster.config import ClusterConfig
from cluster.engine_parts import build_engine
from cluster.processes import DIRECTORY, Place, ProcessCluster
from cluster.verification import Case
from cluster.verification.colocated import answer_colocated
from protocol.generation import GenerationRequest, SamplingParams
from protocol.ids import Role
from router.ports import num_usable
from rpc import wait_until

pytestmark = [pytest.mark.netns, pytest.mark.nixl, pytest.mark.timeout(400)]

WORKERS = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
RESUME_LIMIT_S = 8.0
"""From the cut to the client's next token."""
NUM_PROMPT_TOKENS = 1000
KV_BYTES_PER_TOKEN = 8 * 6 * 16 * 2 * 4  # layers, heads, head_dim, keys and values, float32
SLOW_MBIT_PER_S = 16
"""A whole prompt's KV then takes three seconds."""
MID_FETCH_BYTES = NUM_PROMPT_TOKENS * KV_BYTES_PER_TOKEN // 4


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    reason = obstacle()
    if reason is not None:
        pytest.skip(reason)
    with network(WORKERS) as made:
        yield made


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ClusterConfig:
    model = tiny_model(
        "llama",
        tmp_path_factory.mktemp("models"),
        max_position_embeddings=2048,
        num_hidden_layers=8,
        num_key_value_heads=6,
    )
    return tiny_config(model, prefill__num_workers=2, decode__num_workers=2)


async def test_a_stream_goes_on_elsewhere_when_the_cable_of_its_decode_worker_is_cut(
    hosts: Network, config: ClusterConfig, tmp_path: Path
) -> None:
    case = greedy_case(num_prompt_tokens=100, max_tokens=900)
    golden = lone_answer(config, case)
    async with cluster_on(hosts, config, tmp_path) as cluster, cluster.http() as url:
        stream = Stream.open(url, config, case)
        await stream.wait_for(20)
        victim = busy_decode_worker(cluster, hosts)
        pause_s = await stream.pause_after(victim.cut)
        await stream.end()
        print(f"\nlink of {victim.name} cut mid-stream: the next token came {pause_s:.2f} s later")
        assert stream.token_ids == golden
        assert pause_s < RESUME_LIMIT_S
        victim.heal()
        await assert_pair_works(cluster, "prefill-0", victim.name, case, golden)


async def test_a_stream_goes_on_when_the_cable_of_its_prefill_worker_is_cut_during_the_fetch(
    hosts: Network, config: ClusterConfig, tmp_path: Path
) -> None:
    case = greedy_case(NUM_PROMPT_TOKENS, max_tokens=100)
    golden = lone_answer(config, case)
    async with cluster_on(hosts, config, tmp_path) as cluster, cluster.http() as url:
        owners = [hosts.hosts["prefill-0"], hosts.hosts["prefill-1"]]
        for owner in owners:
            owner.throttle(SLOW_MBIT_PER_S)
        before = {owner.name: owner.num_sent_bytes() for owner in owners}
        stream = Stream.open(url, config, case)
        victim = await first_with(owners, before, MID_FETCH_BYTES)
        assert len(stream.token_ids) <= 1, "the fetch was over before the cut"
        for owner in owners:
            owner.unthrottle()
        pause_s = await stream.pause_after(victim.cut)
        await stream.end()
        print(f"\nlink of {victim.name} cut mid-fetch: the next token came {pause_s:.2f} s later")
        assert stream.token_ids == golden
        assert pause_s < RESUME_LIMIT_S
        victim.heal()
        await assert_pair_works(cluster, victim.name, "decode-0", case, golden)


def greedy_case(num_prompt_tokens: int, max_tokens: int) -> Case:
    sampling = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
    return Case(tuple(make_prompt(num_prompt_tokens)), sampling)


def lone_answer(config: ClusterConfig, case: Case) -> list[int]:
    """The right tokens: those of an engine that does prefill and decode itself."""
    core = build_engine(config, config.decode, open_model(config)).make_core()
    return answer_colocated(core, [case])[0]


def cluster_on(hosts: Network, config: ClusterConfig, folder: Path) -> ProcessCluster:
    over_tcp = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"}
    places = {
        host.name: Place(host=host.address, netns=host.netns, environment=over_tcp)
        for host in hosts.hosts.values()
    }
    return ProcessCluster(config, places={DIRECTORY: Place(host=hosts.address), **places}, log_dir=folder)


def busy_decode_worker(cluster: ProcessCluster, hosts: Network) -> Host:
    busy = [w for w in cluster.router.workers.decode_workers() if w.num_outstanding]
    assert len(busy) == 1
    return hosts.hosts[busy[0].identity.worker_id]


async def first_with(owners: list[Host], before: dict[str, int], num_bytes: int) -> Host:
    """The first one that has sent so many bytes since."""
    while True:
        for owner in owners:
            if owner.num_sent_bytes() - before[owner.name] >= num_bytes:
                return owner
        await asyncio.sleep(0.01)


async def assert_pair_works(
    cluster: ProcessCluster, prefill: str, decode: str, case: Case, golden: list[int]
) -> None:
    """All come back; then these two alone hand a request over, and nothing is left of any."""
    router = cluster.router
    assert await wait_until(lambda: all(num_usable(router.workers, role) == 2 for role in Role), 60), (
        "healed links did not bring the workers back"
    )
    await cluster.wait_until_idle(timeout_s=30)
    removed = [name for name in WORKERS if name not in (prefill, decode)]
    for name in removed:
        cluster.remove(name)
    assert await wait_until(lambda: all(num_usable(router.workers, role) == 1 for role in Role), 60)
    request = GenerationRequest(
        router.new_request_id(), (7, 7, 7, *case.prompt_token_ids), SamplingParams(8, temperature=0.0)
    )
    deltas = [delta async for delta in router.orchestrator.generate(request)]
    assert sum(delta.receipt.fetched_bytes for delta in deltas) > 0
    answer = router.orchestrator.generate(
        GenerationRequest(router.new_request_id(), case.prompt_token_ids, case.sampling)
    )
    assert [token.token_id async for delta in answer for token in delta.tokens] == golden
    for name in removed:
        cluster.restore(name)
    await cluster.wait_until_ready(60)
    await cluster.wait_until_idle(timeout_s=30)


@dataclass
class Stream:
    """One streamed answer as its client gets it."""

    token_ids: list[int] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @classmethod
    def open(cls, url: str, config: ClusterConfig, case: Case) -> Stream:
        stream = cls()
        body = {
            "model": config.model_name,
            "prompt": list(case.prompt_token_ids),
            "max_tokens": case.sampling.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        stream.task = asyncio.create_task(stream._read(f"{url}/v1/completions", body))
        return stream

    async def wait_for(self, num_tokens: int) -> None:
        while len(self.token_ids) < num_tokens:
            self._raise_if_ended()
            await asyncio.sleep(0.001)

    async def pause_after(self, cut: Callable[[], None]) -> float:
        """Cut, and wait for the next token. Returns how long that was.

        Tokens that were under way at the cut may still arrive; the pause is the longest one from then on.
        """
        cut_s = time.monotonic()
        cut()
        known = len(self.token_ids)
        await self.end()
        arrivals_s = [cut_s, *self.arrivals_s[known:]]
        assert len(arrivals_s) > 1, "the stream was over before the cut"
        return max(after - before for before, after in pairwise(arrivals_s))

    async def end(self) -> None:
        assert self.task is not None
        await self.task

    def _raise_if_ended(self) -> None:
        assert self.task is not None
        if self.task.done():
            self.task.result()
            raise AssertionError("the stream is over")

    async def _read(self, url: str, body: dict[str, object]) -> None:
        async with httpx.AsyncClient(timeout=60) as client, client.stream("POST", url, json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for event in _events(answer):
                self.token_ids += event["choices"][0]["token_ids"]  # type: ignore[index]
                self.arrivals_s += [time.monotonic()] * len(event["choices"][0]["token_ids"])  # type: ignore[index]


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, object]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line[6:])
            assert "error" not in event, event
            yield event
