"""From which length on is another worker worth while for a prompt? Hand-off against local prefill.

Two clusters of one prefill and one decode worker each, of the demo model: one hands every prompt over,
the other one computes all of these on the decode worker (`router.local_prefill_tokens`). They take turns,
the other one idle; prompts are random, so that nothing is cached. Per length:

- idle: nothing else runs. busy: NUM_RUNNING other requests decode on the worker meanwhile.
- ttft, second: from the prompt's arrival at the router to the first token, and to the second one.
- itl: the longest wait for a token of those that decode meanwhile, while the prompt is served.

Raises `AssertionError` when the two ways do not give the same tokens.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from uuid import uuid4

from block_shapes import BLOCK_SIZE
from demo_engine import random_prompt
from figures import Figures
from rounds import Rounds

from cluster.config import ClusterConfig
from cluster.processes import ProcessCluster
from protocol.generation import GenerationRequest, SamplingParams
from protocol.ids import RequestId

LENGTHS = (8, 16, 32, 64, 128, 256)
NUM_RUNNING = 8
NUM_OUTPUT_TOKENS = 6
MAX_MODEL_LEN = 2048
NUM_BLOCKS = 1100
WAYS = {"handoff": 0, "local": max(LENGTHS)}
"""Name -> `router.local_prefill_tokens`."""
MS = 1000


@dataclass(frozen=True)
class Served:
    """One request, in seconds."""

    tokens: list[int]
    sent_s: float
    arrivals_s: list[float]

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s

    @property
    def second_s(self) -> float:
        return self.arrivals_s[1] - self.sent_s


@dataclass
class Background:
    """Requests that decode until they are stopped."""

    cluster: ProcessCluster
    arrivals_s: list[list[float]] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> None:
        """Returns when all of them decode."""
        self.arrivals_s = [[] for _ in range(NUM_RUNNING)]
        self.tasks = [asyncio.create_task(self._run(i)) for i in range(NUM_RUNNING)]
        while min(map(len, self.arrivals_s)) < 3:
            for task in self.tasks:
                assert not task.done(), "a request in the background has ended"
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)

    def longest_wait_s(self, served: Served) -> float:
        """For a token that came while this one was served."""
        begin_s, end_s = served.sent_s, served.arrivals_s[1]
        return max(
            later_s - earlier_s
            for arrivals_s in self.arrivals_s
            for earlier_s, later_s in pairwise(arrivals_s)
            if later_s > begin_s and earlier_s < end_s
        )

    async def _run(self, number: int) -> None:
        request = _request(32, f"background {number} {uuid4()}", MAX_MODEL_LEN - 64)
        async for delta in self.cluster.router.orchestrator.generate(request):
            self.arrivals_s[number] += [time.monotonic()] * len(delta.tokens)


def measure(rounds: Rounds, threads: int) -> Figures:
    return asyncio.run(_measure(rounds, threads))


async def _measure(rounds: Rounds, threads: int) -> Figures:
    handoff, local = (ProcessCluster(_config(threads, limit)) for limit in WAYS.values())
    async with handoff, local:
        clusters = dict(zip(WAYS, (handoff, local), strict=True))
        for name, cluster in clusters.items():
            await _ask(cluster, max(LENGTHS), f"warm-up {name}")
        figures = await _compare(clusters, rounds, is_busy=False)
        return figures | await _compare(clusters, rounds, is_busy=True)


async def _compare(clusters: dict[str, ProcessCluster], rounds: Rounds, *, is_busy: bool) -> Figures:
    served: dict[tuple[int, str], list[Served]] = {(n, way): [] for n in LENGTHS for way in clusters}
    waits_s: dict[tuple[int, str], list[float]] = {key: [] for key in served}
    for i in rounds:
        for way, cluster in clusters.items():
            background = Background(cluster)
            if is_busy:
                await background.start()
            for n in LENGTHS:
                one = await _ask(cluster, n, f"{i} {n} {is_busy}")
                served[n, way].append(one)
                if is_busy:
                    await asyncio.sleep(0.3)  # until the tokens that it held up have come
                    waits_s[n, way].append(background.longest_wait_s(one))
            if is_busy:
                await background.stop()
        for n in LENGTHS:
            answers = [served[n, way][-1].tokens for way in clusters]
            assert answers[0] == answers[1], f"{n} tokens: local prefill gives other tokens"
    return _figures("busy" if is_busy else "idle", served, waits_s)


def _figures(
    when: str, served: dict[tuple[int, str], list[Served]], waits_s: dict[tuple[int, str], list[float]]
) -> Figures:
    figures: Figures = {}
    for (n, way), ones in served.items():
        name = f"local_prefill_{when}_{n}_{way}"
        figures[f"{name}_ttft"] = MS * median(one.ttft_s for one in ones), "ms"
        figures[f"{name}_second"] = MS * median(one.second_s for one in ones), "ms"
        figures[f"{name}_second_best"] = MS * min(one.second_s for one in ones), "ms"
        if waits_s[n, way]:
            figures[f"{name}_itl"] = MS * median(waits_s[n, way]), "ms"
    return figures


async def _ask(cluster: ProcessCluster, num_tokens: int, seed: str) -> Served:
    tokens: list[int] = []
    arrivals_s: list[float] = []
    sent_s = time.monotonic()
    async for delta in cluster.router.orchestrator.generate(_request(num_tokens, seed, NUM_OUTPUT_TOKENS)):
        arrivals_s += [time.monotonic()] * len(delta.tokens)
        tokens += [token.token_id for token in delta.tokens]
    return Served(tokens, sent_s, arrivals_s)


def _request(num_tokens: int, seed: str, num_output_tokens: int) -> GenerationRequest:
    sampling = SamplingParams(num_output_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(RequestId(uuid4().hex), tuple(random_prompt(num_tokens, seed)), sampling)


def _config(threads: int, local_prefill_tokens: int) -> ClusterConfig:
    pool = {"threads": threads, "num_blocks": NUM_BLOCKS}
    return ClusterConfig.model_validate(
        {
            "dtype": "float32",
            "block_size": BLOCK_SIZE,
            "max_model_len": MAX_MODEL_LEN,
            "router": {"max_retries": 0, "local_prefill_tokens": local_prefill_tokens},
            "prefill": pool,
            "decode": pool,
        }
    )
