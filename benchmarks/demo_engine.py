"""The demo model's engine in this process, and when it gives which tokens."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pydantic import ByteSize

from cluster.compose import open_model
from cluster.config import ClusterConfig, PoolConfig
from cluster.engine_parts import EngineParts, build_engine
from engine import AddSequence, EngineCore, Event, SequenceFailed, TokensSampled
from protocol.generation import SamplingParams
from protocol.ids import SequenceId

MAX_MODEL_LEN = 4352
NUM_BLOCKS = 1025
"""Of 16 tokens, the null block included: 16,384 tokens."""
NUM_HOST_BLOCKS = 64
VOCABULARY = range(1000, 40_000)
"""Ordinary tokens: no special ones."""


@dataclass
class RunningEngine:
    """One core, and all that it gave so far."""

    core: EngineCore
    added_s: dict[str, float] = field(default_factory=dict)
    token_times_s: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def add(self, name: str, prompt: Iterable[int], num_tokens: int, salt: str = "") -> None:
        """Queue a greedy request of exactly so many output tokens."""
        self.added_s[name] = time.monotonic()
        self.token_times_s[name], self.tokens[name] = [], []
        sampling = SamplingParams(num_tokens, temperature=0.0, ignore_eos=True)
        command = AddSequence(SequenceId(name), tuple(prompt), sampling, cache_salt=salt)
        self._note(self.core.handle(command))

    def step(self) -> None:
        self._note(self.core.step())

    def finish(self) -> None:
        while self.core.has_work:
            self.step()
        self.core.assert_idle()

    def ttft_s(self, name: str) -> float:
        return self.token_times_s[name][0] - self.added_s[name]

    def _note(self, events: list[Event]) -> None:
        now_s = time.monotonic()
        for event in events:
            if isinstance(event, SequenceFailed):
                raise event.error
            if isinstance(event, TokensSampled):
                self.token_times_s[event.seq_id] += [now_s] * len(event.tokens)
                self.tokens[event.seq_id] += [token.token_id for token in event.tokens]


@dataclass(frozen=True)
class DemoEngine:
    """The loaded model. Only one of its running engines may have work: they share the KV cache."""

    parts: EngineParts

    @classmethod
    def load(cls, threads: int) -> DemoEngine:
        config = ClusterConfig(dtype="float32", max_model_len=MAX_MODEL_LEN)
        # 2 (keys, values) of float32 in 30 layers of 3 heads of 64, 16 tokens per block.
        block_bytes = 2 * 4 * 30 * 3 * 64 * 16
        pool = PoolConfig(
            threads=threads,
            num_blocks=NUM_BLOCKS,
            preemption="swap",
            swap_memory=ByteSize(NUM_HOST_BLOCKS * block_bytes),
        )
        return cls(build_engine(config, pool, open_model(config)))

    def start(self, **settings: object) -> RunningEngine:
        """An engine with an empty prefix cache; `settings` replace fields of its `SchedulerConfig`."""
        changed = {"preemption": "recompute", "num_host_blocks": 0, **settings}
        parts = replace(self.parts, scheduler=replace(self.parts.scheduler, **changed))  # type: ignore[arg-type]
        return RunningEngine(parts.make_core())


def random_prompt(length: int, seed: str) -> list[int]:
    return random.Random(seed).choices(VOCABULARY, k=length)
