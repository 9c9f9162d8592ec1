"""Which token does one uniform number per row choose?

    temperature -> softmax -> cut the tail -> inverse CDF

The inverse CDF runs over the tokens in order of id, so no sort's treatment of ties can matter.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.filters import thresholds
from protocol.generation import SamplingParams


class Draw(Protocol):
    """How tokens are drawn on some device."""

    def __call__(
        self, logits: torch.Tensor, params: Items[SamplingParams], noise: npt.NDArray[np.float64]
    ) -> list[int]:
        """Per row of `logits` [rows, vocab] the token that `noise` [rows], in (0, 1), chooses.

        Temperatures are positive and bounded, min-p is in [0, 1]. No row's token depends on the others.
        """


def draw_with_torch(
    logits: torch.Tensor, params: Items[SamplingParams], noise: npt.NDArray[np.float64]
) -> list[int]:
    """On any device. A row without anything to draw from gives `vocab`."""
    temperatures = torch.tensor([[p.temperature] for p in params], device=logits.device)
    # The maximum goes first, lest a small temperature make infinities of large logits.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperatures)
    probabilities = torch.softmax(scaled, dim=-1)
    if any(p.top_p < 1.0 or p.top_k or p.min_p for p in params):
        lowest = thresholds(probabilities, params)
        probabilities = probabilities.masked_fill_(probabilities < lowest, 0.0)
    return _invert(probabilities, torch.from_numpy(noise).to(logits.device))


def _invert(probabilities: torch.Tensor, noise: torch.Tensor) -> list[int]:
    """Per row the first token whose cumulated probability exceeds `noise` [rows] times the row's total.

    float32 will do: it is off by 1e-7 of the total, and a float64 sum takes ten times as long. A token of
    probability 0 does not raise the sum, so it is never the first.
    """
    cumulative = probabilities.cumsum(-1)
    totals = cumulative[:, -1:].contiguous()
    targets = (noise[:, None] * totals).to(totals.dtype)
    # Rounding may lift a target to the total, which no sum exceeds.
    targets = torch.minimum(targets, torch.nextafter(totals, torch.zeros_like(totals)))
    token_ids: list[int] = torch.searchsorted(cumulative, targets, right=True)[:, 0].tolist()
    return token_ids
