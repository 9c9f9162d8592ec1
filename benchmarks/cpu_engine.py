"""The demo model in bfloat16 at a given context: its bare steps, and the same ones through the engine.

The KV cache holds arbitrary numbers: sequences are reserved and admitted as on a decode worker, so that no
prompt need be computed before its decoding can be timed.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import torch

from engine import (
    AddSequence,
    AdmitSequence,
    BlocksAllocated,
    EngineCore,
    Event,
    ReserveSequence,
    SchedulerConfig,
    SequenceFailed,
    TokensSampled,
)
from engine.kv_cache import KvCache
from engine.model import DecoderModel, ModelConfig
from engine.model.decoding import MAX_SEQUENCES, RecordedDecoding
from engine.model.weights import pack_weights
from engine.ops import Ops
from engine.ops.cpu import CpuOps
from engine.plan import Slice
from engine.runner import ModelRunner, make_layout
from engine.sequence import Sequence
from engine.weights import ModelFolder, load_weights
from protocol.generation import SamplingParams
from protocol.ids import BlockId, SequenceId
from protocol.ports import Clock

CONTEXT = 512
BLOCK_SIZE = 16
MAX_BATCH = 64
MAX_STEPS = 400
"""Tokens that a sequence has room for after its context."""
CPU = torch.device("cpu")
GREEDY = SamplingParams(MAX_STEPS, temperature=0.0, ignore_eos=True)
VOCABULARY = range(1000, 40_000)
"""Ordinary tokens: no special ones."""


class DemoModel:
    """The model, a KV cache for MAX_BATCH sequences, and steps without an engine."""

    def __init__(
        self,
        folder: ModelFolder,
        ops: Ops,
        max_batch: int = MAX_BATCH,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.clock = clock
        self.config = ModelConfig.from_hf(folder.config)
        self.ops = ops
        max_len = CONTEXT + MAX_STEPS + BLOCK_SIZE
        checkpoint = load_weights(folder, torch.bfloat16)
        weights = pack_weights(self.config, checkpoint, ops, CPU, torch.bfloat16)
        self.model = DecoderModel(
            self.config, weights, ops, device=CPU, dtype=torch.bfloat16, max_model_len=max_len
        )
        self.num_blocks = 1 + max_batch * -(-max_len // BLOCK_SIZE)
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

    def prefill_s(self, length: int) -> float:
        """Seconds of one bare step over a whole prompt, with the logits of its last token."""
        return self._step_s([Slice(self._sequence(0, length, 0), length)])

    def decode_s(self, batch: int) -> float:
        """Seconds of one bare step of `batch` sequences at the context."""
        sequences = [self._sequence(i, CONTEXT, CONTEXT - 1) for i in range(batch)]
        if self._recorded is None or batch > MAX_SEQUENCES:
            return self._step_s([Slice(sequence, 1) for sequence in sequences])
        with torch.inference_mode():
            started_s = self.clock()
            self._recorded.logits(sequences)
            return self.clock() - started_s

    def _sequence(self, index: int, length: int, num_computed: int) -> Sequence:
        count = -(-length // BLOCK_SIZE)
        return Sequence(
            seq_id=SequenceId(f"s{index}"),
            sampling=GREEDY,
            token_ids=random.Random(index).choices(VOCABULARY, k=length),
            num_prompt_tokens=length,
            num_computed=num_computed,
            block_table=[BlockId(1 + index * count + i) for i in range(count)],
        )

    def _step_s(self, slices: list[Slice]) -> float:
        layout = make_layout(slices, BLOCK_SIZE, self.ops.row_multiple)
        parts = [s.token_ids[s.num_computed : s.num_computed + count] for s, count in slices]
        token_ids = torch.tensor([token for part in parts for token in part])
        positions = torch.from_numpy(layout.positions)
        last_rows = torch.from_numpy(layout.query_starts[1:].astype(np.int64) - 1)
        with torch.inference_mode():
            started_s = self.clock()
            attention = self.ops.attention(layout, self.kv_cache.blocks)
            self.model.logits(self.model.forward(token_ids, positions, attention), last_rows)
            return self.clock() - started_s


class Decoding:
    """An engine in which `batch` sequences decode from the context on."""

    def __init__(self, demo: DemoModel, batch: int, sampling: SamplingParams = GREEDY) -> None:
        self._clock = demo.clock
        self._core = make_core(demo)
        for i in range(batch):
            name = SequenceId(f"s{i}")
            prompt = tuple(random.Random(i).choices(VOCABULARY, k=CONTEXT))
            told = self._core.handle(ReserveSequence(name, prompt, sampling))
            if not any(isinstance(event, BlocksAllocated) for event in told):
                raise RuntimeError(f"no blocks for sequence {i} of {batch}: {told}")
            self._core.handle(AdmitSequence(name, ((0, 1000 + i),)))
        self._batch = batch
        self.last_events: list[Event] = []

    def step_s(self) -> float:
        started_s = self._clock()
        self.last_events = self._core.step()
        whole_s = self._clock() - started_s
        if sum(isinstance(event, TokensSampled) for event in self.last_events) != self._batch:
            raise RuntimeError("a sequence ended before the measurement did")
        return whole_s


class Prefilling:
    """An engine that computes one prompt per step."""

    def __init__(self, demo: DemoModel) -> None:
        self._clock = demo.clock
        self._core = make_core(demo)
        self._num_prompts = 0

    def step_s(self, length: int) -> float:
        self._num_prompts += 1
        name = SequenceId(f"p{self._num_prompts}")
        prompt = tuple(random.Random(str(name)).choices(VOCABULARY, k=length))
        started_s = self._clock()
        self._core.handle(AddSequence(name, prompt, SamplingParams(1, temperature=0.0, ignore_eos=True)))
        events = self._core.step()
        whole_s = self._clock() - started_s
        if any(isinstance(event, SequenceFailed) for event in events) or self._core.has_work:
            raise RuntimeError(f"a prompt of {length} tokens was not one step")
        return whole_s


def make_core(demo: DemoModel) -> EngineCore:
    config = SchedulerConfig(
        num_blocks=demo.num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=demo.model.max_model_len,
        low_watermark=0.0,
        high_watermark=0.0,
    )
    runner = ModelRunner(demo.model, demo.kv_cache, ())
    return EngineCore(config, runner, frozenset(), time.monotonic)


def make_ops(cache_dir: Path, config: ModelConfig, num_threads: int) -> CpuOps:
    return CpuOps.create(cache_dir, dtype=torch.bfloat16, head_dim=config.head_dim, num_threads=num_threads)
