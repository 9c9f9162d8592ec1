"""The reference: Hugging Face transformers on the same folder, one prompt at a time, greedy."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cluster.verification.cases import Case

BF16_ROUNDINGS = 2.0
"""Two logits are a tie when they are closer than this many bfloat16 steps at their size."""


class TransformersReference:
    """A float32 model; the oracle of every comparison. Slow, and only for verifying."""

    def __init__(self, folder: Path, eos_token_ids: Sequence[int]) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._eos_token_ids = list(eos_token_ids)

    async def answer(self, cases: Sequence[Case]) -> list[list[int]]:
        """Greedy output token ids, the end-of-sequence token included."""
        return await asyncio.to_thread(lambda: [self._continue(case) for case in cases])

    def _continue(self, case: Case) -> list[int]:
        from transformers import GenerationConfig

        prompt = torch.tensor([case.prompt_token_ids])  # [1, tokens]
        greedy = GenerationConfig(
            do_sample=False,
            max_new_tokens=case.sampling.max_tokens,
            eos_token_id=self._eos_token_ids or None,
            pad_token_id=self._eos_token_ids[0] if self._eos_token_ids else 0,
        )
        with torch.inference_mode():
            output = self._model.generate(
                prompt, attention_mask=torch.ones_like(prompt), generation_config=greedy
            )
        answer: list[int] = output[0, prompt.shape[1] :].tolist()
        return answer

    def is_bf16_tie(self, case: Case, output: Sequence[int]) -> bool:
        """Whether bfloat16 cannot tell the two best next tokens after `output` apart."""
        with torch.inference_mode():
            ids = torch.tensor([[*case.prompt_token_ids, *output]])
            best = self._model(ids).logits[0, -1].float().topk(2).values
        step = float(best[0].abs()) * torch.finfo(torch.bfloat16).eps
        return float(best[0] - best[1]) <= BF16_ROUNDINGS * step
