"""Executes a step plan with torch: builds the batch, runs the model, samples.

`ModelRunner` implements `engine.plan.Executor`. Everything but the last tensors is numpy on the host: at
batch 1 a step's preparation must cost microseconds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from itertools import islice

import numpy as np
import torch

from engine.batch import NULL_BLOCK, Batch
from engine.captured_decoding import Capture, CapturedDecoding
from engine.device import wait_for
from engine.forward import ForwardPass
from engine.host_kv_pool import HostKvPool
from engine.kv_cache import KvCache
from engine.model import DecoderModel
from engine.model.decoding import MAX_SEQUENCES, RecordedDecoding
from engine.ops import Drawer
from engine.plan import Slice, StepPlan, StepResult
from engine.sampling import Sampler, are_usable, draw_with_torch, score_prompts
from engine.sequence import Sequence
from protocol.generation import SamplingParams, Token
from protocol.ids import BlockId, SequenceId

logger = logging.getLogger(__name__)


class ModelRunner:
    """Owns the path from plan to tokens. Used by the engine thread only; keeps no state between steps."""

    def __init__(
        self,
        model: DecoderModel,
        kv_cache: KvCache,
        eos_token_ids: tuple[int, ...],
        host_pool: HostKvPool | None = None,
        *,
        capture: Capture | None = None,
        max_sequences: int = MAX_SEQUENCES,
    ) -> None:
        """`host_pool` is where plans that swap do it; without one they are faults.

        With a `capture` all steps that only decode are captured, of up to `max_sequences` sequences, unless
        other ranks have a part in the model, or it waits for the device: neither can be captured.
        """
        self._model = model
        self._kv_cache = kv_cache
        self._forward = ForwardPass(model, kv_cache, host_pool)
        draw = model.ops.draw if isinstance(model.ops, Drawer) else draw_with_torch
        self._sampler = Sampler(eos_token_ids, draw)
        self._decoding: RecordedDecoding | CapturedDecoding | None
        if capture is None or model.waits or not model.partition.is_whole:
            self._decoding = RecordedDecoding.create(model, kv_cache.blocks)
        else:
            self._decoding = CapturedDecoding(model, kv_cache.blocks, capture, max_sequences)

    @property
    def ops_name(self) -> str:
        """What computes, for people."""
        return self._model.ops.name

    @property
    def progress(self) -> int:
        """Grows with every layer of every step. May be read from any thread."""
        return self._model.num_layers_run

    def execute(self, plan: StepPlan) -> StepResult:
        """Move blocks, write the KV of every slice's tokens, and sample and score where it is due."""
        with torch.inference_mode():
            self._forward.move(plan)
            result = self._step(plan) if plan.slices else StepResult(())
            wait_for(self._model.device)  # a step that samples nothing has not waited for its KV yet
            return result

    def _step(self, plan: StepPlan) -> StepResult:
        decoding = self._decoding
        if decoding is not None and plan.num_decodes == len(plan.slices) <= decoding.max_sequences:
            return self._decode(plan.slices, decoding)
        return self._compute(plan.slices)

    def warm_up(self) -> None:
        """Run a prefill and a decode into the null block, so that the first request finds all warm."""
        if isinstance(self._decoding, CapturedDecoding):
            with torch.inference_mode():
                self._decoding.warm_up()
        for plan in self.warm_up_plans():
            self.execute(plan)

    def warm_up_plans(self, num_tokens: int = 64) -> Iterator[StepPlan]:
        """To be executed one by one."""
        num_tokens = min(num_tokens, self._model.max_model_len - 1)
        sequence = Sequence(
            seq_id=SequenceId("warm-up"),
            sampling=SamplingParams(max_tokens=2, temperature=0.8, top_p=0.9),
            token_ids=[0] * num_tokens,
            num_prompt_tokens=num_tokens,
            block_table=[BlockId(NULL_BLOCK)] * (num_tokens // self._kv_cache.block_size + 1),
        )
        yield StepPlan([Slice(sequence, num_tokens)], num_tokens)
        sequence.num_computed = num_tokens
        sequence.token_ids.append(0)
        yield StepPlan([Slice(sequence, 1)], 1, num_decodes=1)

    def _compute(self, slices: Items[Slice]) -> StepResult:
        batch = Batch.of(slices, self._kv_cache.block_size)
        layout = self._forward.layout(batch)
        hidden = self._forward.run(batch, layout)
        scores = score_prompts(slices, layout.query_starts, lambda rows: self._forward.logits(hidden, rows))
        last_rows = layout.query_starts[1:] - 1
        due = [position for position, part in enumerate(slices) if part.samples]
        logits = self._forward.logits(hidden, last_rows[due].astype(np.int64))
        return self._choose(slices, due, logits, scores)

    def _decode(self, slices: Items[Slice], decoding: RecordedDecoding | CapturedDecoding) -> StepResult:
        """As `_compute`, for slices that are all decodes."""
        logits = decoding.logits([part.sequence for part in slices])
        return self._choose(slices, range(len(slices)), logits, {})

    def _choose(
        self,
        slices: Items[Slice],
        due: Items[int],
        logits: torch.Tensor,
        scores: Mapping[int, list[Token]],
    ) -> StepResult:
        """`logits` [len(due), vocab] of the slices at the positions `due`."""
        sampled = self._sample(logits, [slices[position].sequence for position in due])
        tokens: list[Token | None] = [None] * len(slices)
        siblings: dict[int, Items[Token]] = {}
        failed = {position for position, scored in scores.items() if not are_usable(scored)}
        for position, choices in zip(due, sampled, strict=True):
            usable = [token for token in choices if token is not None]
            if len(usable) < len(choices):
                failed.add(position)
                continue
            tokens[position], *others = usable
            if others:
                siblings[position] = others
        for position in failed:
            logger.error("the model gave no numbers for %s", slices[position].sequence.seq_id)
        return StepResult(tokens, siblings, scores, failed)

    def _sample(self, logits: torch.Tensor, sequences: Items[Sequence]) -> list[list[Token | None]]:
        """Per row of `logits` the token of its sequence, then one for each of the sequence's siblings."""
        choices = [choice for sequence in sequences for choice in (sequence, *sequence.siblings)]
        counts = [1 + len(sequence.siblings) for sequence in sequences]
        if len(choices) > len(sequences):
            owners = np.repeat(np.arange(len(sequences)), counts)
            logits = logits.index_select(0, self._forward.to_device(owners))
        tokens = iter(self._sampler.sample(logits, choices))
        return [list(islice(tokens, count)) for count in counts]
