"""The demo model in bfloat16 and steps to measure: bare ones, and the same through the engine.

The KV cache holds arbitrary numbers: sequences are reserved and admitted as on a decode worker, so that no
prompt need be computed before its decoding can be timed.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine import (
    AddSequence,
    AdmitSequence,
    BlocksAllocated,
    EngineCore,
    ReserveSequence,
    SchedulerConfig,
    SequenceFailed,
    TokensSampled,
)
from engine.batch import make_layout
from engine.kv_cache import KvCache
from engine.model import DecoderModel, ModelConfig
from engine.model.decoding import MAX_SEQUENCES, RecordedDecoding
from engine.model.weights import pack_weights
from engine.ops import Ops
from engine.ops.cpu import CpuOps
from engine.plan import Slice
from engine.runner import ModelRunner
from engine.sequence import Sequence
from engine.weights import ModelFolder, load_weights
from protocol.generation import SamplingParams
from protocol.ids import BlockId, SequenceId
from protocol.ports import Clock

BLOCK_SIZE = 16
MAX_CONTEXT = 4096
MAX_STEPS = 400
"""Tokens that a sequence has room for after its context."""
MAX_LEN = MAX_CONTEXT + MAX_STEPS + BLOCK_SIZE
CPU = torch.device("cpu")
GREEDY = SamplingParams(MAX_STEPS, temperature=0.0, ignore_eos=True)
ONE_TOKEN = SamplingParams(1, temperature=0.0, ignore_eos=True)
VOCABULARY = range(1000, 40_000)
"""Ordinary tokens: no special ones."""


@dataclass(frozen=True)
class Step:
    """Some sequences compute their last tokens, as many each; the others lie in the cache already."""

    name: str
    num_sequences: int
    num_tokens: int = 1
    context: int = 512
    """Tokens of each sequence once the step is done."""

    @property
    def num_rows(self) -> int:
        return self.num_sequences * self.num_tokens

    @property
    def num_cached(self) -> int:
        return self.context - self.num_tokens

    @property
    def num_blocks(self) -> int:
        """With room for the tokens that follow."""
        return self.num_sequences * -(-(self.context + MAX_STEPS) // BLOCK_SIZE)


class DemoModel:
    """The model, a KV cache, and steps without an engine."""

    def __init__(
        self, folder: ModelFolder, ops: Ops, num_blocks: int, clock: Clock = time.perf_counter
    ) -> None:
        self.clock = clock
        self.config = ModelConfig.from_hf(folder.config)
        self.ops = ops
        checkpoint = load_weights(folder, torch.bfloat16)
        weights = pack_weights(self.config, checkpoint, ops, CPU, torch.bfloat16)
        self.model = DecoderModel(
            self.config, weights, ops, device=CPU, dtype=torch.bfloat16, max_model_len=MAX_LEN
        )
        self.num_blocks = 1 + num_blocks
        self.kv_cache = KvCache(
            self.config,
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            dtype=torch.bfloat16,
            device=CPU,
        )
        torch.manual_seed(0)
        self.kv_cache.blocks.copy_(torch.randn(self.kv_cache.blocks.shape[1:]).mul_(0.5))
        self._recorded = RecordedDecoding.create(self.model, self.kv_cache.blocks)

    def step_s(self, step: Step) -> float:
        """Seconds of one bare step, with the logits of each sequence's last token."""
        sequences = [self._sequence(i, step) for i in range(step.num_sequences)]
        with torch.inference_mode():
            if step.num_tokens > 1 or self._recorded is None or len(sequences) > MAX_SEQUENCES:
                return self._compute_s(sequences, step.num_tokens)
            started_s = self.clock()
            self._recorded.logits(sequences)
            return self.clock() - started_s

    def _sequence(self, index: int, step: Step) -> Sequence:
        count = -(-step.context // BLOCK_SIZE)
        return Sequence(
            seq_id=SequenceId(f"s{index}"),
            sampling=GREEDY,
            token_ids=prompt_of(str(index), step.context),
            num_prompt_tokens=step.context,
            num_computed=step.num_cached,
            block_table=[BlockId(1 + index * count + i) for i in range(count)],
        )

    def _compute_s(self, sequences: list[Sequence], num_tokens: int) -> float:
        layout = make_layout([Slice(s, num_tokens) for s in sequences], BLOCK_SIZE, self.ops.row_multiple)
        token_ids = torch.tensor([token for s in sequences for token in s.token_ids[-num_tokens:]])
        positions = torch.from_numpy(layout.positions)
        last_rows = torch.from_numpy(layout.query_starts[1:].astype(np.int64) - 1)
        started_s = self.clock()
        attention = self.ops.attention(layout, self.kv_cache.blocks)
        self.model.logits(self.model.forward(token_ids, positions, attention), last_rows)
        return self.clock() - started_s


class Decoding:
    """An engine in which sequences decode from the step's context on."""

    def __init__(self, demo: DemoModel, step: Step, sampling: SamplingParams = GREEDY) -> None:
        self._clock = demo.clock
        self._core = make_core(demo)
        for i in range(step.num_sequences):
            name = SequenceId(f"s{i}")
            prompt = tuple(prompt_of(name, step.context))
            told = self._core.handle(ReserveSequence(name, prompt, sampling))
            if not any(isinstance(event, BlocksAllocated) for event in told):
                raise RuntimeError(f"no blocks for sequence {i} of {step.num_sequences}: {told}")
            self._core.handle(AdmitSequence(name, ((0, 1000 + i),)))
        self._num_sequences = step.num_sequences

    def step_s(self) -> float:
        started_s = self._clock()
        events = self._core.step()
        whole_s = self._clock() - started_s
        if sum(isinstance(event, TokensSampled) for event in events) != self._num_sequences:
            raise RuntimeError("a sequence ended before the measurement did")
        return whole_s


class Prefilling:
    """An engine that computes prompts, those of one step at a time. Cached tokens are those of a prefix."""

    def __init__(self, demo: DemoModel, step: Step) -> None:
        self._clock = demo.clock
        self._core = make_core(demo)
        self._plan = step
        self._prefix = prompt_of("prefix", step.num_cached)
        self._num_prompts = 0
        if self._prefix:
            self._compute_s([tuple(self._prefix)])

    def step_s(self) -> float:
        step, first = self._plan, self._num_prompts
        new = [prompt_of(f"new {first + i}", step.num_tokens) for i in range(step.num_sequences)]
        return self._compute_s([(*self._prefix, *tokens) for tokens in new])

    def _compute_s(self, prompts: list[tuple[int, ...]]) -> float:
        started_s = self._clock()
        for prompt in prompts:
            self._num_prompts += 1
            name = SequenceId(f"p{self._num_prompts}")
            self._core.handle(
                AddSequence(name, prompt, SamplingParams(1, temperature=0.0, ignore_eos=True))
            )
        events = self._core.step()
        whole_s = self._clock() - started_s
        if any(isinstance(event, SequenceFailed) for event in events) or self._core.has_work:
            raise RuntimeError(f"{len(prompts)} prompts of {len(prompts[0])} tokens were not one step")
        return whole_s


def engine_of(demo: DemoModel, step: Step) -> Decoding | Prefilling:
    return Decoding(demo, step) if step.num_tokens == 1 else Prefilling(demo, step)


def prompt_of(seed: str, length: int) -> list[int]:
    return random.Random(seed).choices(VOCABULARY, k=length)


def make_core(demo: DemoModel) -> EngineCore:
    config = SchedulerConfig(
        num_blocks=demo.num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=demo.model.max_model_len,
        max_num_batched_tokens=MAX_CONTEXT,
        low_watermark=0.0,
        high_watermark=0.0,
    )
    runner = ModelRunner(demo.model, demo.kv_cache, ())
    return EngineCore(config, runner, frozenset(), time.monotonic)


def make_ops(cache_dir: Path, config: ModelConfig, num_threads: int) -> CpuOps:
    return CpuOps.create(cache_dir, dtype=torch.bfloat16, head_dim=config.head_dim, num_threads=num_threads)
