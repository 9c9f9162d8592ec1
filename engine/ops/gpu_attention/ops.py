"""The Triton ops with somebody else's attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.ops.gpu_attention.port import AttentionLibrary, StepKernel
from engine.ops.port import BatchLayout, RotatingAttention
from engine.ops.triton.attention import TritonAttention
from engine.ops.triton.ops import TritonOps
from engine.ops.triton.tuning import Tuning


class LibraryOps(TritonOps):
    """Implements `Ops`. Used by one thread, as the library's scratch memory is shared by all steps."""

    attention_waits = True

    def __init__(self, tuning: Tuning, library: AttentionLibrary) -> None:
        super().__init__(tuning)
        self._library = library
        self.name = f"Triton, attention by {library.name}"

    def attention(self, layout: BatchLayout, kv_blocks: torch.Tensor) -> RotatingAttention:
        writer = TritonAttention(layout, kv_blocks, self._tuning)
        return LibraryAttention(layout, writer, self._library.step(layout, writer.tables, kv_blocks))


class LibraryAttention:
    """Implements `RotatingAttention`: Triton writes, a library attends.

    It is no `UploadedAttention`: libraries plan a step on the host, by the lengths of its sequences.
    """

    def __init__(self, layout: BatchLayout, writer: TritonAttention, kernel: StepKernel) -> None:
        self._layout = layout
        self._kernel = kernel
        self.write = writer.write
        self.rotate_and_write = writer.rotate_and_write

    def attend(self, layer: int, queries: torch.Tensor, window: int | None) -> torch.Tensor:
        num_rows = int(self._layout.query_starts[-1])
        output = self._kernel.attend(layer, queries[:num_rows], window)
        num_padded = len(queries) - num_rows
        return F.pad(output, (0, 0, 0, 0, 0, num_padded)) if num_padded else output
