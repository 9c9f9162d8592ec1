"""The same steps by transformers' `generate`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from cpu_engine import prompt_of

from protocol.ports import Clock

NUM_STEPS = 4
"""Decode steps of one call; the first one, which also takes the prompt in, does not count."""
CONTEXT = 512
KINDS = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""Our steps are in bfloat16; on a CPU that does not multiply it, transformers is faster in float32."""


class Peer:
    """One loaded transformers model."""

    def __init__(self, folder: Path, kind: str, clock: Clock) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._clock = clock
        self._dtype = KINDS[kind]
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=self._dtype).eval()

    def prefill_s(self) -> float:
        """Seconds until the first token of one prompt."""
        (stamp_s,) = self._stamps(_prompts(1, CONTEXT), None, 1)
        return stamp_s

    def decode_s(self, batch: int) -> list[float]:
        """Seconds of each of a few steps at the context. All but one of its tokens are in the cache."""
        stamps = self._stamps(_prompts(batch, CONTEXT), self._cache(batch), NUM_STEPS + 1)
        return [later - earlier for earlier, later in itertools.pairwise(stamps)]

    def _stamps(self, prompts: torch.Tensor, cache: object, num_tokens: int) -> list[float]:
        """When each token was there, in seconds since the call."""
        from transformers import StoppingCriteriaList

        stamps: list[float] = []
        started_s = self._clock()

        def note(input_ids: torch.Tensor, scores: object, **others: object) -> torch.Tensor:
            stamps.append(self._clock() - started_s)
            return torch.zeros(len(input_ids), dtype=torch.bool)

        self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            past_key_values=cache,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([note]),
        )
        return stamps

    def _cache(self, batch: int) -> object:
        from transformers import DynamicCache

        config = self._model.config
        head_dim = config.hidden_size // config.num_attention_heads
        shape = (batch, config.num_key_value_heads, CONTEXT - 1, head_dim)
        cache = DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            keys, values = torch.randn(2, *shape).mul_(0.5).to(self._dtype)
            cache.update(keys, values, layer)
        return cache


def _prompts(batch: int, length: int) -> torch.Tensor:
    return torch.tensor([prompt_of(f"s{i}", length) for i in range(batch)])
