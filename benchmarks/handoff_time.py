"""How long does a client wait between the first token, from P, and the next one, from D? And with overlap?

A cluster of one prefill and one decode worker, each a process; one request at a time, of random tokens, so
that no cache helps. Times are those at which the router has the tokens.

- first_token_to_second: all of it. That is
- decode_step: what D computes for its first own token, by its own clock, and
- time: all the rest, which is the hand-off. The parts of both, by the clock that all processes share:
  until_read (from P's sampling to the last read's begin), read, verdict (the owner's word that the lease
  held, and P's first token on its way over the router), step (until D has sampled: decode_step, and what
  the engine makes it wait), back (to the router).
- raw: a NIXL read of as many blocks of the same size, scattered, between two processes without a cluster.
- above_raw: time less raw, by medians; above_raw_best: between the best of both, for busy machines.
- time_of_the_first: the same of the first request, for which everything happens for the first time.

`measure`: with the demo model in float32, and in turns with a lone engine of the same model. The pools
are large: every request gets blocks that nothing was ever written to, as in a cluster that is new.
- prefill alone: that engine, with the threads and chunks of P, from the prompt's arrival to its second
  token, less one decode step: what P computes, without a hand-off.
- ttft and handoff: from the prompt's arrival at the router to D's first own token, less one decode step.
  All chunks but the last are read while P computes the next one.

`measure_blank`: with workers that compute nothing (see `stamped_workers`), and so have all of the prompt to
read after the first token: what the hand-off itself costs.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from uuid import uuid4

from block_shapes import BLOCK_SIZE, SHAPES, block_bytes
from demo_engine import DemoEngine, random_prompt
from figures import Figures
from raw_transfer import RawReader, memcpy_s, raw_readers
from rounds import Rounds
from stamps import ADMITTED, READ_BEGINS, READ_ENDS, Stamp, read_stamps, sampled

from cluster.config import ClusterConfig
from cluster.processes import ProcessCluster
from protocol.generation import GenerationRequest, SamplingParams
from protocol.ids import RequestId, Role

NUM_OUTPUT_TOKENS = 6
CHUNK_TOKENS = 512
WARM_UP_TOKENS = 512
MIB = 2**20
MS = 1000


@dataclass(frozen=True)
class Times:
    """Of one request, in seconds."""

    ttft_s: float
    gap_s: float
    """From the first token to the second."""
    step_s: float
    """Of that, what the decode step took."""
    stages_s: dict[str, float] = field(default_factory=dict)
    fetched_bytes: int = 0

    @property
    def handoff_s(self) -> float:
        return self.gap_s - self.step_s

    @property
    def until_handed_off_s(self) -> float:
        return self.ttft_s + self.handoff_s


@dataclass
class Record:
    """What one run has measured so far."""

    name: str
    num_bytes: int
    raw: RawReader
    first: Times | None = None
    handed: list[Times] = field(default_factory=list)
    raws_s: list[float] = field(default_factory=list)
    copies_s: list[float] = field(default_factory=list)

    async def measure_raw(self) -> None:
        """In threads: a router that does not come to read takes its workers for silent."""
        self.raws_s.append(await asyncio.to_thread(self.raw.read_s, shuffled=True))
        self.copies_s.append(await asyncio.to_thread(memcpy_s, self.num_bytes))

    def figures(self) -> Figures:
        """Medians, and what was best."""
        assert self.first is not None, "all rounds were made"
        handoffs_s = [times.handoff_s for times in self.handed]
        handoff_s, raw_s = median(handoffs_s), median(self.raws_s)
        best_s, best_raw_s = min(handoffs_s), min(self.raws_s)
        stages = {
            f"{self.name}_stage_{stage}": (MS * median(t.stages_s[stage] for t in self.handed), "ms")
            for stage in self.handed[0].stages_s
        }
        return {
            f"{self.name}_rounds": (len(self.handed), "rounds"),
            f"{self.name}_first_token_to_second": (MS * median(t.gap_s for t in self.handed), "ms"),
            f"{self.name}_decode_step": (MS * median(t.step_s for t in self.handed), "ms"),
            f"{self.name}_time": (MS * handoff_s, "ms"),
            f"{self.name}_time_best": (MS * best_s, "ms"),
            f"{self.name}_time_of_the_first": (MS * self.first.handoff_s, "ms"),
            **stages,
            f"{self.name}_raw_nixl": (MS * raw_s, "ms"),
            f"{self.name}_raw_nixl_best": (MS * best_raw_s, "ms"),
            f"{self.name}_memcpy": (MS * median(self.copies_s), "ms"),
            f"{self.name}_above_raw": (MS * (handoff_s - raw_s), "ms"),
            f"{self.name}_above_raw_best": (MS * (best_s - best_raw_s), "ms"),
            f"{self.name}_fetched": (median(t.fetched_bytes for t in self.handed) / MIB, "MiB"),
        }


@dataclass(frozen=True)
class StampedCluster:
    """One prefill and one decode worker that note when what happens."""

    cluster: ProcessCluster
    folder: Path

    async def ask(self, num_tokens: int, seed: str) -> Times:
        sampling = SamplingParams(NUM_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        prompt = tuple(random_prompt(num_tokens, seed))
        request = GenerationRequest(RequestId(uuid4().hex), prompt, sampling)
        receipts, arrivals_s = [], []
        sent_s = time.monotonic()
        async for delta in self.cluster.router.orchestrator.generate(request):
            arrivals_s += [time.monotonic()] * len(delta.tokens)
            receipts.append(delta.receipt)
        first_s, second_s = arrivals_s[:2]
        # The router's own small hand-offs come between.
        stamps = [
            s
            for s in read_stamps(self.folder, sent_s)
            if s.whose.partition("#")[0] in (request.request_id, "")
        ]
        decoded = _last(stamps, sampled(Role.DECODE), second_s)
        admitted_s = _last(stamps, ADMITTED, decoded.time_s).time_s
        read_ends_s = _last(stamps, READ_ENDS, admitted_s).time_s
        read_begins_s = _last(stamps, READ_BEGINS, read_ends_s).time_s
        stages_s = {
            "until_read": read_begins_s - _last(stamps, sampled(Role.PREFILL), first_s).time_s,
            "read": read_ends_s - read_begins_s,
            "verdict": admitted_s - read_ends_s,
            "step": decoded.time_s - admitted_s,
            "back": second_s - decoded.time_s,
        }
        return Times(
            first_s - sent_s, second_s - first_s, decoded.value, stages_s, receipts[1].fetched_bytes
        )


def _last(stamps: list[Stamp], name: str, until_s: float) -> Stamp:
    return [stamp for stamp in stamps if stamp.name == name and stamp.time_s <= until_s][-1]


@asynccontextmanager
async def stamped_cluster(config: ClusterConfig, build: str) -> AsyncIterator[StampedCluster]:
    with tempfile.TemporaryDirectory() as folder:
        async with ProcessCluster(
            config, build=f"stamped_workers:{build}", log_dir=Path(folder)
        ) as cluster:
            yield StampedCluster(cluster, Path(folder))


def measure(num_tokens: int, rounds: Rounds, threads: int) -> Figures:
    """With the demo model, for one length of the prompt."""
    engine = DemoEngine.load(threads)
    num_bytes = num_tokens // BLOCK_SIZE * block_bytes(SHAPES["demo"])
    with raw_readers(num_bytes, (num_tokens // BLOCK_SIZE,)) as (raw,):
        record = Record(f"handoff_{num_tokens}", num_bytes, raw)
        lone = asyncio.run(_take_turns(record, num_tokens, rounds, threads, engine))
    together = [times.until_handed_off_s for times in record.handed]
    together_s, together_best_s = median(together), min(together)
    alone = [times.until_handed_off_s for times in lone]
    alone_s, alone_best_s = median(alone), min(alone)
    return record.figures() | {
        f"{record.name}_ttft": (median(times.ttft_s for times in record.handed), "s"),
        f"{record.name}_ttft_and_handoff": (together_s, "s"),
        f"{record.name}_prefill_alone": (alone_s, "s"),
        f"{record.name}_ttft_and_handoff_to_prefill_alone": (together_s / alone_s, "ratio"),
        f"{record.name}_ttft_and_handoff_to_prefill_alone_best": (together_best_s / alone_best_s, "ratio"),
    }


def measure_blank(num_tokens: int, rounds: Rounds) -> Figures:
    """With workers that compute nothing, for one length of the prompt and both shapes of blocks."""
    figures: Figures = {}
    for name, shape in SHAPES.items():
        num_bytes = num_tokens // BLOCK_SIZE * block_bytes(shape)
        with raw_readers(num_bytes, (num_tokens // BLOCK_SIZE,)) as (raw,):
            record = Record(f"handoff_blank_{name}_{num_tokens}", num_bytes, raw)
            asyncio.run(_hand_blanks_over(record, f"build_{name}", num_tokens, rounds))
        figures |= record.figures()
    return figures


async def _take_turns(
    record: Record, num_tokens: int, rounds: Rounds, threads: int, alone: DemoEngine
) -> list[Times]:
    """The lone engine's times."""
    lone: list[Times] = []
    num_blocks = (rounds.most * num_tokens + WARM_UP_TOKENS) // BLOCK_SIZE + 100
    async with stamped_cluster(_config(num_tokens, threads, num_blocks), "build_model") as cluster:
        record.first = await cluster.ask(WARM_UP_TOKENS, "warm-up")
        record.raw.read_s(shuffled=True)
        for i in rounds:
            record.handed.append(await cluster.ask(num_tokens, f"P and D {i}"))
            lone.append(await asyncio.to_thread(_ask_alone, alone, num_tokens, f"alone {i}"))
            await record.measure_raw()
    return lone


async def _hand_blanks_over(record: Record, build: str, num_tokens: int, rounds: Rounds) -> None:
    num_blocks = num_tokens // BLOCK_SIZE + 10  # the workers have pools of their own
    async with stamped_cluster(_config(num_tokens, 1, num_blocks), build) as cluster:
        record.first = await cluster.ask(num_tokens, "warm-up")
        record.raw.read_s(shuffled=True)
        for i in rounds:
            record.handed.append(await cluster.ask(num_tokens, f"{i}"))
            await record.measure_raw()


def _config(num_tokens: int, threads: int, num_blocks: int) -> ClusterConfig:
    pool = {"threads": threads, "num_blocks": num_blocks, "max_num_batched_tokens": CHUNK_TOKENS}
    return ClusterConfig.model_validate(
        {
            "dtype": "float32",
            "block_size": BLOCK_SIZE,
            "max_model_len": num_tokens + NUM_OUTPUT_TOKENS,
            "router": {"max_retries": 0, "local_prefill_tokens": 0},
            "prefill": pool,
            "decode": pool,
        }
    )


def _ask_alone(demo: DemoEngine, num_tokens: int, seed: str) -> Times:
    engine = demo.start(max_num_batched_tokens=CHUNK_TOKENS)
    engine.add("r", random_prompt(num_tokens, seed), NUM_OUTPUT_TOKENS)
    engine.finish()
    times_s = engine.token_times_s["r"]
    gap_s, *later_s = (after - before for before, after in pairwise(times_s))
    return Times(times_s[0] - engine.added_s["r"], gap_s, median(later_s))
