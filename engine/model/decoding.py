"""Steps in which few sequences decode one token each: recorded once, and then repeated in one call.

Such a step takes milliseconds, and hundreds of calls from Python would be a good part of them.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.model.decoder import DecoderModel, Embedded
from engine.ops import BatchLayout, Recorder, Recording, StepAttention
from engine.sequence import Sequence

MAX_SEQUENCES = 32
"""For more the calls do not matter; recordings hold the memory of a step of so many rows."""


class RecordedDecoding:
    """Computes the logits of decodes over one KV cache. Used by one thread."""

    def __init__(self, model: DecoderModel, recorder: Recorder, kv_blocks: torch.Tensor) -> None:
        """`recorder` is the model's ops; `kv_blocks` [blocks, layers, 2, kv_heads, block_size, head_dim]
        stays where it is.
        """
        self.max_sequences = MAX_SEQUENCES
        self._model = model
        self._recorder = recorder
        self._kv_blocks = kv_blocks
        self._steps: dict[int, _Step] = {}

    @classmethod
    def create(cls, model: DecoderModel, kv_blocks: torch.Tensor) -> RecordedDecoding | None:
        """None where the model's ops cannot record, it waits, or other ranks have a part in it."""
        if model.waits or not model.partition.is_whole or not isinstance(model.ops, Recorder):
            return None
        return cls(model, model.ops, kv_blocks)

    def logits(self, sequences: Items[Sequence]) -> torch.Tensor:
        """Write the KV of each sequence's only pending token; its float32 logits [sequences, vocab].

        For MAX_SEQUENCES at most. The result is good until the next call, of whatever number.
        """
        step = self._steps.get(len(sequences))
        if step is None:
            step = self._steps[len(sequences)] = self._record(sequences)
        else:
            step.inputs.fill(self._model, sequences)
            step.recording.run()
            self._model.num_layers_run += self._model.config.num_layers
        return step.recording.output

    def _record(self, sequences: Items[Sequence]) -> _Step:
        model = self._model
        inputs = _Inputs.allocate(model, len(sequences), self._kv_blocks.shape[4])
        inputs.fill(model, sequences)
        attention = model.ops.attention(inputs.layout, self._kv_blocks)

        def compute() -> torch.Tensor:
            return model.all_logits(model.layers(inputs.embedded, attention))

        return _Step(inputs, attention, self._recorder.record(compute))


@dataclass(frozen=True, slots=True)
class _Step:
    inputs: _Inputs
    attention: StepAttention
    """Holds memory that the recording reads."""
    recording: Recording


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What differs from step to step, in memory that stays."""

    block_size: int
    layout: BatchLayout
    token_ids: npt.NDArray[np.int64]  # [sequences]
    embedded: Embedded

    @classmethod
    def allocate(cls, model: DecoderModel, count: int, block_size: int) -> _Inputs:
        layout = BatchLayout(
            query_starts=np.arange(count + 1, dtype=np.int32),
            context_lens=np.zeros(count, dtype=np.int32),
            block_tables=np.zeros((count, -(-model.max_model_len // block_size)), dtype=np.int32),
            positions=np.zeros(count, dtype=np.int64),
            slots=np.zeros(count, dtype=np.int64),
        )
        token_ids = np.zeros(count, dtype=np.int64)
        embedded = model.embed(torch.from_numpy(token_ids), torch.from_numpy(layout.positions))
        return cls(block_size, layout, token_ids, embedded)

    def fill(self, model: DecoderModel, sequences: Items[Sequence]) -> None:
        layout = self.layout
        width = layout.block_tables.shape[1]
        for row, sequence in enumerate(sequences):
            position = sequence.num_computed
            blocks = sequence.block_table[:width]
            block, offset = divmod(position, self.block_size)
            self.token_ids[row] = sequence.token_ids[position]
            layout.positions[row] = position
            layout.context_lens[row] = position + 1
            layout.slots[row] = blocks[block] * self.block_size + offset
            layout.block_tables[row, : len(blocks)] = blocks
        model.embed_into(
            self.embedded, torch.from_numpy(self.token_ids), torch.from_numpy(layout.positions)
        )
