"""What an attention library must do for the ops: attend. Writing into the cache stays Triton's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from engine.ops.port import BatchLayout
from engine.ops.triton.step_tables import StepTables

Tables = Callable[[], StepTables]
"""The layout on the device; uploaded by the first call of a step."""


class StepKernel(Protocol):
    """The attention of one step, without the rows of padding."""

    def attend(self, layer: int, queries: torch.Tensor, window: int | None) -> torch.Tensor:
        """As `StepAttention.attend`, of exactly the rows that belong to sequences.

        `queries` may be a view of wider rows; its heads are contiguous.
        """


class AttentionLibrary(Protocol):
    """A library that is installed, and takes this engine's numbers and heads on this GPU."""

    @property
    def name(self) -> str:
        """For people."""

    def step(self, layout: BatchLayout, tables: Tables, kv_blocks: torch.Tensor) -> StepKernel:
        """Prepare one step. The layout's arrays are read by `attend`, not here.

        Raises `StartupError` for blocks that the library cannot read.
        """
