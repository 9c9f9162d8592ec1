"""FlashInfer (the package flashinfer-python) over our KV blocks: planned once per step and window.

Written against the signatures of 0.7.4, and tested against a stand-in of them; it has not run on a device.

* Blocks are [blocks, 2, kv_heads, block_size, head_dim] to it, its layout HND: our cache at one layer, a
  view that is contiguous but for the distance from block to block, which the kernels read from its
  strides, as they do with queries. Keys and values must have equal strides, and do.
* The backend is fa2, on every GPU: its kernels load no key and no value past a sequence's end, where a
  failed transfer may have left NaNs. Others may, and `auto` changes its mind from release to release.
* Slots before a window share tiles with those in it. They hold the sequence's own, finite KV.
* Planning copies the tables from the device, as in its documentation, and so waits for what was computed
  before: without the wait it would write over a plan that is still on its way to the device.
* Kernels are compiled with nvcc when first planned, in the engine's warm-up, unless flashinfer-jit-cache
  is installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.ops.gpu_attention.port import Tables
from engine.ops.port import BatchLayout

WORKSPACE_BYTES = 128 << 20
"""As its documentation recommends; allocated before the KV pool is, so that it is not counted as free."""
NO_WINDOW = -1


class FlashInfer:
    """Implements `AttentionLibrary`. A wrapper has one plan at a time: there is one per window, and for
    decodes another one than for steps with chunks."""

    GENERATIONS = frozenset({8, 9, 10, 11, 12})
    """Of GPUs (compute capability)."""
    HEAD_DIMS = frozenset({64, 128, 256})
    name = "FlashInfer"

    def __init__(self, flashinfer: Any, device: torch.device) -> None:
        """`flashinfer`: the module."""
        self._flashinfer = flashinfer
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._planned: dict[tuple[bool, int], _Planned] = {}

    def step(self, layout: BatchLayout, tables: Tables, kv_blocks: torch.Tensor) -> FlashInferStep:
        del tables  # it wants the blocks of all sequences in one row
        return FlashInferStep(self, layout, kv_blocks)

    def planned(self, step: FlashInferStep, num_heads: int, window_left: int, dtype: torch.dtype) -> Any:
        """A wrapper whose plan is that of `step`."""
        only_decodes = step.only_decodes
        planned = self._planned.get((only_decodes, window_left))
        if planned is None:
            planned = self._planned[only_decodes, window_left] = _Planned(self._make_wrapper(only_decodes))
        if planned.step is not step:
            step.plan(planned.wrapper, num_heads, window_left, dtype)
            planned.step = step
        return planned.wrapper

    def _make_wrapper(self, only_decodes: bool) -> Any:
        """They share the workspace, where nothing outlives a call."""
        if only_decodes:
            # Without tensor cores it takes few ratios of heads to KV heads.
            return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "HND", use_tensor_cores=True, backend="fa2"
            )
        return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND", backend="fa2")


@dataclass(slots=True)
class _Planned:
    wrapper: Any
    step: FlashInferStep | None = None


class FlashInferStep:
    """Implements `StepKernel`."""

    def __init__(self, library: FlashInfer, layout: BatchLayout, kv_blocks: torch.Tensor) -> None:
        self._library = library
        self._layout = layout
        self._kv_blocks = kv_blocks

    @property
    def only_decodes(self) -> bool:
        return bool((np.diff(self._layout.query_starts) == 1).all())

    def attend(self, layer: int, queries: torch.Tensor, window: int | None) -> torch.Tensor:
        # The bound is inclusive, and counts from the query's own position.
        window_left = NO_WINDOW if window is None else window - 1
        wrapper = self._library.planned(self, queries.shape[1], window_left, queries.dtype)
        output: torch.Tensor = wrapper.run(queries, self._kv_blocks[:, layer])
        return output

    def plan(self, wrapper: Any, num_heads: int, window_left: int, dtype: torch.dtype) -> None:
        _, _, _, num_kv_heads, block_size, head_dim = self._kv_blocks.shape
        starts = [] if self.only_decodes else [self._to_device(self._layout.query_starts)]
        wrapper.plan(
            *starts,
            *map(self._to_device, _block_rows(self._layout, block_size)),
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            **({} if self.only_decodes else {"causal": True}),
            window_left=window_left,
            q_data_type=dtype,
            kv_data_type=dtype,
        )

    def _to_device(self, array: npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._kv_blocks.device)


def _block_rows(layout: BatchLayout, block_size: int) -> tuple[npt.NDArray[np.int32], ...]:
    """All int32: where each sequence's blocks start [sequences + 1], the blocks of all sequences one after
    another, and how many tokens are in each sequence's last block [sequences]."""
    num_blocks = -(-layout.context_lens // block_size)
    starts = np.concatenate([[0], np.cumsum(num_blocks)]).astype(np.int32)
    in_use = np.arange(layout.block_tables.shape[1]) < num_blocks[:, None]
    in_last_block = (layout.context_lens - (num_blocks - 1) * block_size).astype(np.int32)
    return starts, layout.block_tables[in_use], in_last_block
