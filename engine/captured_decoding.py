"""Steps in which every sequence decodes one token, captured once for each padded number of sequences.

Such a step is hundreds of launches that take a GPU less time than Python takes to ask for them. What
differs from step to step lies in memory that stays where it is; a captured step reads it there. Rows of
padding are sequences of no token: they read nothing, and write nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.model import DecoderModel
from engine.ops import BatchLayout, Recording, UploadedAttention
from engine.sequence import Sequence
from protocol.errors import EngineFault

Capture = Callable[[Callable[[], torch.Tensor]], Recording]
"""Does work that uses the device alone, once at least, and records it."""


def bucket_sizes(max_sequences: int) -> list[int]:
    """The padded numbers of sequences: few enough to capture all, and never twice what is needed."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_sequences, 32)]
    return [*(size for size in steps if size < max_sequences), max_sequences]


class CapturedDecoding:
    """Computes the logits of decodes over one KV cache. Used by one thread."""

    def __init__(
        self, model: DecoderModel, kv_blocks: torch.Tensor, capture: Capture, max_sequences: int
    ) -> None:
        """`kv_blocks` [blocks, layers, 2, kv_heads, block_size, head_dim] stays where it is."""
        self.max_sequences = max_sequences
        self._model = model
        self._kv_blocks = kv_blocks
        self._capture = capture
        self._sizes = bucket_sizes(max_sequences)
        self._steps: dict[int, _Step] = {}

    def warm_up(self) -> None:
        """Capture all steps, the largest first: the others fit into the memory that it leaves."""
        for size in reversed(self._sizes):
            self._step_for(size)

    def logits(self, sequences: Items[Sequence]) -> torch.Tensor:
        """Write the KV of each sequence's only pending token; its float32 logits [sequences, vocab].

        For `max_sequences` at most. The result is good until the next call, of whatever number.
        """
        step = self._step_for(next(size for size in self._sizes if size >= len(sequences)))
        step.inputs.fill(sequences)
        step.upload()
        step.recording.run()
        self._model.num_layers_run += self._model.config.num_layers
        return step.recording.output[: len(sequences)]

    def _step_for(self, size: int) -> _Step:
        if size not in self._steps:
            self._steps[size] = self._capture_step(size)
        return self._steps[size]

    def _capture_step(self, size: int) -> _Step:
        """With nothing but padding, so that capturing touches no sequence's KV."""
        model = self._model
        inputs = _Inputs.allocate(size, model.max_model_len, self._kv_blocks.shape[4])
        attention = model.ops.attention(inputs.layout, self._kv_blocks)
        if not isinstance(attention, UploadedAttention):
            raise EngineFault(f"the ops {model.ops.name!r} cannot be captured")
        tokens_and_positions = torch.zeros(2, size, dtype=torch.int64, device=model.device)
        attention.upload()

        def compute() -> torch.Tensor:
            tokens, positions = tokens_and_positions.unbind()
            return model.all_logits(model.forward(tokens, positions, attention))

        return _Step(inputs, attention, tokens_and_positions, self._capture(compute))


@dataclass(frozen=True, slots=True)
class _Step:
    inputs: _Inputs
    attention: UploadedAttention
    tokens_and_positions: torch.Tensor  # [2, bucket] on the device
    recording: Recording

    def upload(self) -> None:
        """Bring the inputs to where the captured work finds them."""
        self.tokens_and_positions.copy_(torch.from_numpy(self.inputs.tokens_and_positions))
        self.attention.upload()


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What differs from step to step, on the host."""

    block_size: int
    layout: BatchLayout
    tokens_and_positions: npt.NDArray[np.int64]  # [2, bucket]

    @classmethod
    def allocate(cls, size: int, max_model_len: int, block_size: int) -> _Inputs:
        tokens_and_positions = np.zeros((2, size), dtype=np.int64)
        layout = BatchLayout(
            query_starts=np.arange(size + 1, dtype=np.int32),
            context_lens=np.zeros(size, dtype=np.int32),
            block_tables=np.zeros((size, -(-max_model_len // block_size)), dtype=np.int32),
            positions=tokens_and_positions[1],
            slots=np.zeros(size, dtype=np.int64),
        )
        return cls(block_size, layout, tokens_and_positions)

    def fill(self, sequences: Items[Sequence]) -> None:
        """The sequences, then padding. Tables are filled as far as they are read."""
        layout, width = self.layout, self.layout.block_tables.shape[1]
        tokens, positions = self.tokens_and_positions
        for row, sequence in enumerate(sequences):
            position = sequence.num_computed
            blocks = sequence.block_table[:width]
            block, offset = divmod(position, self.block_size)
            tokens[row] = sequence.token_ids[position]
            positions[row] = position
            layout.context_lens[row] = position + 1
            layout.slots[row] = blocks[block] * self.block_size + offset
            layout.block_tables[row, : len(blocks)] = blocks
        padding = slice(len(sequences), None)
        for array in (tokens, positions, layout.context_lens, layout.slots):
            array[padding] = 0
