"""Executes a step plan with torch: builds the batch, runs the model, samples.

`ModelRunner` implements `engine.plan.Executor`. Everything but the last tensors is numpy on the host: at
batch 1 a step's preparation must cost microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt
import torch

from engine.kv_cache import KvCache
from engine.model import DecoderModel
from engine.ops import BatchLayout
from engine.plan import Slice, StepPlan, StepResult
from engine.sampling import Sampler
from engine.sequence import Sequence
from protocol.generation import SamplingParams, Token
from protocol.ids import SequenceId

NULL_BLOCK = 0


class ModelRunner:
    """Owns the path from plan to tokens. Used by the engine thread only; keeps nothing between steps."""

    def __init__(self, model: DecoderModel, kv_cache: KvCache, eos_token_ids: tuple[int, ...]) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._sampler = Sampler(eos_token_ids)

    def execute(self, plan: StepPlan) -> StepResult:
        """Write the KV of every slice's tokens, and sample where a slice is due."""
        if not plan.slices:
            return StepResult(())
        with torch.inference_mode():
            logits = self._forward(plan.slices)
            sampling = [part.sequence for part in plan.slices if part.samples]
            tokens = iter(self._sampler.sample(logits[: len(sampling)], sampling))
        result: list[Token | None] = [next(tokens) if part.samples else None for part in plan.slices]
        return StepResult(result)

    def warm_up(self, num_tokens: int = 64) -> None:
        """Run a prefill and a decode into the null block, so that the first request finds all warm."""
        num_tokens = min(num_tokens, self._model.max_model_len - 1)
        sequence = Sequence(
            seq_id=SequenceId("warm-up"),
            sampling=SamplingParams(max_tokens=2, temperature=0.8, top_p=0.9),
            token_ids=[0] * num_tokens,
            num_prompt_tokens=num_tokens,
            block_table=[],
        )
        self.execute(StepPlan([Slice(sequence, num_tokens)], num_tokens))
        sequence.num_computed = num_tokens
        sequence.token_ids.append(0)
        self.execute(StepPlan([Slice(sequence, 1)], 1))

    def _forward(self, slices: Items[Slice]) -> torch.Tensor:
        """Logits of the sampling slices' last rows; a few rows of padding may follow."""
        multiple = self._model.ops.row_multiple
        layout = make_layout(slices, self._kv_cache.block_size, multiple)
        token_ids = _gather_token_ids(slices, layout.num_rows)
        last_rows = layout.query_starts[1:] - 1
        sampled = last_rows[[part.samples for part in slices]].astype(np.int64)
        sampled = np.pad(sampled, (0, -len(sampled) % multiple))
        device = self._model.device
        return self._model.forward(
            torch.from_numpy(token_ids).to(device),
            torch.from_numpy(layout.positions).to(device),
            self._model.ops.attention(layout, self._kv_cache.blocks),
            torch.from_numpy(sampled).to(device),
        )


def make_layout(slices: Items[Slice], block_size: int, row_multiple: int) -> BatchLayout:
    """Where the tokens of the slices lie; rows are padded to a multiple of `row_multiple`.

    A block table that is too short is continued with the null block (only `warm_up` has such).
    """
    starts = np.array([part.sequence.num_computed for part in slices], dtype=np.int64)
    counts = np.array([part.num_tokens for part in slices], dtype=np.int64)
    query_starts = np.zeros(len(slices) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])
    context_lens = starts + counts
    tables = _block_tables(slices, -(-int(context_lens.max()) // block_size))
    num_rows = -(-int(query_starts[-1]) // row_multiple) * row_multiple
    owners = np.repeat(np.arange(len(slices)), counts)
    positions = np.zeros(num_rows, dtype=np.int64)
    positions[: len(owners)] = np.arange(len(owners)) + (starts - query_starts[:-1])[owners]
    slots = np.full(num_rows, NULL_BLOCK * block_size, dtype=np.int64)
    blocks, offsets = np.divmod(positions[: len(owners)], block_size)
    slots[: len(owners)] = tables[owners, blocks].astype(np.int64) * block_size + offsets
    return BatchLayout(query_starts, context_lens.astype(np.int32), tables, positions, slots)


def _block_tables(slices: Items[Slice], num_columns: int) -> npt.NDArray[np.int32]:
    tables = np.full((len(slices), num_columns), NULL_BLOCK, dtype=np.int32)
    for row, part in zip(tables, slices, strict=True):
        blocks = part.sequence.block_table[:num_columns]
        row[: len(blocks)] = blocks
    return tables


def _gather_token_ids(slices: Items[Slice], num_rows: int) -> npt.NDArray[np.int64]:
    token_ids = np.zeros(num_rows, dtype=np.int64)
    start = 0
    for sequence, num_tokens in slices:
        first = sequence.num_computed
        token_ids[start : start + num_tokens] = sequence.token_ids[first : first + num_tokens]
        start += num_tokens
    return token_ids
