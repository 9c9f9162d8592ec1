"""Runs the model over a batch, and moves blocks before that: what every rank of a worker does alike."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import Batch
from engine.host_kv_pool import HostKvPool
from engine.kv_cache import KvCache
from engine.model import DecoderModel, HiddenState
from engine.ops import BatchLayout
from engine.plan import StepPlan
from protocol.errors import EngineFault


class ForwardPass:
    """One rank's model, KV cache and host pool. Used by one thread, under `torch.inference_mode`."""

    def __init__(self, model: DecoderModel, kv_cache: KvCache, host_pool: HostKvPool | None) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self._host_pool = host_pool

    def move(self, plan: StepPlan) -> None:
        """Carry the plan's moves out. Raises `EngineFault` for one that swaps without a host pool."""
        if plan.swaps_out or plan.swaps_in:
            if self._host_pool is None:
                raise EngineFault("the plan swaps, but there is no host pool")
            self._host_pool.swap_out(plan.swaps_out)
            self._host_pool.swap_in(plan.swaps_in)
        self.kv_cache.copy_blocks(plan.copies)

    def layout(self, batch: Batch) -> BatchLayout:
        return batch.layout(self.kv_cache.block_size, self.model.ops.row_multiple)

    def run(self, batch: Batch, layout: BatchLayout) -> HiddenState:
        """Write the KV of the batch's tokens; `layout` is its own."""
        return self.model.forward(
            self.to_device(batch.padded_token_ids(layout.num_rows)),
            self.to_device(layout.positions),
            self.model.ops.attention(layout, self.kv_cache.blocks),
        )

    def logits(self, hidden: HiddenState, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """Float32 logits [len(rows), vocab], contiguous."""
        num_missing = -len(rows) % self.model.ops.row_multiple
        padded = np.pad(rows, (0, num_missing)) if num_missing else rows
        return self.model.logits(hidden, self.to_device(padded))[: len(rows)]

    def to_device(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.model.device)
