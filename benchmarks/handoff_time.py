"""How long does a client wait between the first token, from P, and the next one, from D? And with overlap?

A cluster of one prefill and one decode worker, each a process; one request at a time, of random tokens, so
that no cache helps. Times are those at which the router has the tokens.

- hand-off: from P's first token to D's first own one, less one decode step (the median time between D's
  later tokens of the same request).
- time_of_the_first: the same of the first request. Its KV goes to memory that the kernel has yet to give;
  all later ones use that memory again, as in a cluster that has been running for a while.
- raw: a NIXL read of as many blocks of the same size, scattered, between two processes without a cluster.

`measure`: with the demo model in float32, and in turns with a lone engine of the same model.
- prefill alone: that engine, with the threads and chunks of P, from the prompt's arrival to its second
  token, less one decode step: what P computes, without a hand-off.
- ttft and handoff: from the prompt's arrival at the router to D's first own token, less one decode step.
  All chunks but the last are read while P computes the next one.

`measure_blank`: with workers that compute nothing (see `blank_workers`), and so have all of the prompt to
read after the first token: what the hand-off itself costs.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from uuid import uuid4

from block_shapes import BLOCK_SIZE, SHAPES, block_bytes
from demo_engine import DemoEngine, random_prompt
from figures import Figures
from raw_transfer import RawReader, memcpy_s, raw_readers

from cluster.config import ClusterConfig
from cluster.processes import ProcessCluster
from protocol.generation import GenerationRequest, Receipt, SamplingParams
from protocol.ids import RequestId

NUM_OUTPUT_TOKENS = 24
CHUNK_TOKENS = 512
MIB = 2**20
MS = 1000


@dataclass(frozen=True)
class Times:
    """Of one request, in seconds."""

    ttft_s: float
    gap_s: float
    """From the first token to the second."""
    step_s: float
    """The median of the later ones."""
    receipt: Receipt
    """Of the second token."""

    @classmethod
    def of(cls, sent_s: float, arrivals_s: list[float], receipt: Receipt) -> Times:
        gap_s, *later_s = (after - before for before, after in pairwise(arrivals_s))
        return cls(arrivals_s[0] - sent_s, gap_s, median(later_s), receipt)

    @property
    def handoff_s(self) -> float:
        return self.gap_s - self.step_s

    @property
    def until_handed_off_s(self) -> float:
        return self.ttft_s + self.handoff_s


@dataclass
class Rounds:
    """What one run has measured so far."""

    name: str
    num_bytes: int
    raw: RawReader
    first: Times | None = None
    """Of the request for which every block of the pools was touched for the first time."""
    handed: list[Times] = field(default_factory=list)
    raws_s: list[float] = field(default_factory=list)
    copies_s: list[float] = field(default_factory=list)

    async def measure_raw(self) -> None:
        """In threads: a router that does not come to read takes its workers for silent."""
        self.raws_s.append(await asyncio.to_thread(self.raw.read_s, shuffled=True))
        self.copies_s.append(await asyncio.to_thread(memcpy_s, self.num_bytes))

    def figures(self) -> Figures:
        """Medians; `best` compares the best hand-off with the best raw read, for busy machines."""
        assert self.first is not None, "all rounds were made"
        handoffs_s = [times.handoff_s for times in self.handed]
        handoff_s, raw_s = median(handoffs_s), median(self.raws_s)
        best_s = min(handoffs_s) - min(self.raws_s)
        return {
            f"{self.name}_first_token_to_second": (MS * median(t.gap_s for t in self.handed), "ms"),
            f"{self.name}_decode_step": (MS * median(t.step_s for t in self.handed), "ms"),
            f"{self.name}_time": (MS * handoff_s, "ms"),
            f"{self.name}_raw_nixl": (MS * raw_s, "ms"),
            f"{self.name}_memcpy": (MS * median(self.copies_s), "ms"),
            f"{self.name}_above_raw": (MS * (handoff_s - raw_s), "ms"),
            f"{self.name}_above_raw_best": (MS * best_s, "ms"),
            f"{self.name}_time_of_the_first": (MS * self.first.handoff_s, "ms"),
            f"{self.name}_fetch_after_prefill": (MS * median(t.receipt.fetch_s for t in self.handed), "ms"),
            f"{self.name}_fetched": (median(t.receipt.fetched_bytes for t in self.handed) / MIB, "MiB"),
        }


def measure(num_tokens: int, num_rounds: int, threads: int) -> Figures:
    """With the demo model, for one length of the prompt."""
    alone = DemoEngine.load(threads)
    num_bytes = num_tokens // BLOCK_SIZE * block_bytes(SHAPES["demo"])
    with raw_readers(num_bytes, (num_tokens // BLOCK_SIZE,)) as (raw,):
        rounds = Rounds(f"handoff_{num_tokens}", num_bytes, raw)
        lone = asyncio.run(_take_turns(rounds, num_tokens, num_rounds, threads, alone))
    together_s = median(times.until_handed_off_s for times in rounds.handed)
    alone_s = median(times.until_handed_off_s for times in lone)
    return rounds.figures() | {
        f"{rounds.name}_ttft": (median(times.ttft_s for times in rounds.handed), "s"),
        f"{rounds.name}_ttft_and_handoff": (together_s, "s"),
        f"{rounds.name}_prefill_alone": (alone_s, "s"),
        f"{rounds.name}_ttft_and_handoff_to_prefill_alone": (together_s / alone_s, "ratio"),
    }


def measure_blank(num_tokens: int, num_rounds: int) -> Figures:
    """With workers that compute nothing, for one length of the prompt and both shapes of blocks."""
    figures: Figures = {}
    for name, shape in SHAPES.items():
        num_bytes = num_tokens // BLOCK_SIZE * block_bytes(shape)
        with raw_readers(num_bytes, (num_tokens // BLOCK_SIZE,)) as (raw,):
            rounds = Rounds(f"handoff_blank_{name}_{num_tokens}", num_bytes, raw)
            asyncio.run(_hand_blanks_over(rounds, f"blank_workers:build_{name}", num_tokens, num_rounds))
        figures |= rounds.figures()
    return figures


async def _take_turns(
    rounds: Rounds, num_tokens: int, num_rounds: int, threads: int, alone: DemoEngine
) -> list[Times]:
    """The lone engine's times."""
    lone: list[Times] = []
    async with ProcessCluster(_config(num_tokens, threads)) as cluster:
        rounds.first = await _ask(cluster, num_tokens, "warm-up")
        rounds.raw.read_s(shuffled=True)
        for i in range(num_rounds):
            rounds.handed.append(await _ask(cluster, num_tokens, f"P and D {i}"))
            lone.append(await asyncio.to_thread(_ask_alone, alone, num_tokens, f"alone {i}"))
            await rounds.measure_raw()
    return lone


async def _hand_blanks_over(rounds: Rounds, build: str, num_tokens: int, num_rounds: int) -> None:
    async with ProcessCluster(_config(num_tokens, 1), build=build) as cluster:
        rounds.first = await _ask(cluster, num_tokens, "warm-up")
        rounds.raw.read_s(shuffled=True)
        for i in range(num_rounds):
            rounds.handed.append(await _ask(cluster, num_tokens, f"{i}"))
            await rounds.measure_raw()


def _config(num_tokens: int, threads: int) -> ClusterConfig:
    """Pools that hold one request, so that after the first one no block is touched for the first time."""
    max_model_len = num_tokens + NUM_OUTPUT_TOKENS
    pool = {
        "threads": threads,
        "num_blocks": max_model_len // BLOCK_SIZE + 4,
        "max_num_batched_tokens": CHUNK_TOKENS,
    }
    return ClusterConfig.model_validate(
        {
            "dtype": "float32",
            "block_size": BLOCK_SIZE,
            "max_model_len": max_model_len,
            "router": {"max_retries": 0},
            "prefill": pool,
            "decode": pool,
        }
    )


async def _ask(cluster: ProcessCluster, num_tokens: int, seed: str) -> Times:
    sampling = SamplingParams(NUM_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    prompt = tuple(random_prompt(num_tokens, seed))
    request = GenerationRequest(RequestId(uuid4().hex), prompt, sampling)
    receipts, arrivals_s = [], []
    sent_s = time.monotonic()
    async for delta in cluster.router.orchestrator.generate(request):
        arrivals_s += [time.monotonic()] * len(delta.tokens)
        receipts.append(delta.receipt)
    return Times.of(sent_s, arrivals_s, receipts[1])


def _ask_alone(demo: DemoEngine, num_tokens: int, seed: str) -> Times:
    engine = demo.start(max_num_batched_tokens=CHUNK_TOKENS)
    engine.add("r", random_prompt(num_tokens, seed), NUM_OUTPUT_TOKENS)
    engine.finish()
    return Times.of(engine.added_s["r"], engine.token_times_s["r"], Receipt())
