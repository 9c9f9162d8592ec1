"""From logits to tokens, one row per sequence; no row's result depends on the other rows.

    raw logits -> (log-probabilities to report)
               -> adjust -> greedy: argmax, ties to the lowest id
                         -> else:   temperature -> softmax -> cut the tail -> inverse CDF at one uniform

The inverse CDF runs over the tokens in order of id, so no sort's treatment of ties can matter.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np
import torch

from engine.sampling.adjustments import adjust
from engine.sampling.draw import Draw, draw_with_torch
from engine.sampling.logprobs import Reports
from engine.sampling.noise import uniforms
from engine.sequence import Sequence
from protocol.generation import SamplingParams, Token

MIN_TEMPERATURE = 1e-5
"""Below this, dividing by the temperature says nothing that greedy does not."""
MAX_TEMPERATURE = 1e6
"""Above this, dividing would lift banned tokens to where all others are."""


class Sampler:
    """Chooses the next token of each sequence. Stateless."""

    def __init__(self, eos_token_ids: tuple[int, ...], draw: Draw = draw_with_torch) -> None:
        self._eos_token_ids = eos_token_ids
        self._draw = draw

    def sample(self, logits: torch.Tensor, sequences: Items[Sequence]) -> list[Token | None]:
        """One token per row of `logits` [sequences, vocab], float32, which may be overwritten.

        None for a row that holds NaN or nothing that can be chosen: the others must not suffer for it.
        """
        if not sequences:
            return []
        reports = Reports(logits, sequences)
        adjust(logits, sequences, self._eos_token_ids)
        chosen, is_usable = _greedy(logits)
        noisy = [i for i, s in enumerate(sequences) if is_usable[i] and not _is_greedy(s.sampling)]
        if noisy:
            # Not `logits[noisy]`: most often that is all rows, and then it would be a needless copy.
            rows = logits if len(noisy) == len(sequences) else logits[noisy]
            picks = self._pick(rows, [sequences[i] for i in noisy])
            for row, token_id in zip(noisy, picks, strict=True):
                if token_id < logits.shape[1]:  # else there was nothing to draw from: greedy it is
                    chosen[row] = token_id
        tokens = reports.tokens(chosen)
        return [token if usable else None for token, usable in zip(tokens, is_usable, strict=True)]

    def _pick(self, logits: torch.Tensor, sequences: Items[Sequence]) -> list[int]:
        params = [_bounded(sequence.sampling) for sequence in sequences]
        noise = uniforms([p.seed for p in params], [len(s.token_ids) for s in sequences])
        return self._draw(logits, params, noise)


def _is_greedy(params: SamplingParams) -> bool:
    return not params.temperature >= MIN_TEMPERATURE or params.top_k == 1  # NaN is greedy


def _bounded(params: SamplingParams) -> SamplingParams:
    """What no definition covers is made sane; NaN is off."""
    temperature = min(params.temperature, MAX_TEMPERATURE)
    min_p = min(max(0.0, params.min_p), 1.0)
    if (temperature, min_p) == (params.temperature, params.min_p):
        return params
    return replace(params, temperature=temperature, min_p=min_p)


def _greedy(logits: torch.Tensor) -> tuple[list[int], list[bool]]:
    """Per row the lowest id of the greatest logit, and whether all is well with the row.

    argmax takes NaN for the greatest, so a NaN anywhere in a row shows in its best.
    """
    if logits.device.type == "cpu":
        values = logits.numpy()  # ten times as fast as torch
        best = values.argmax(axis=-1)
        return best.tolist(), np.isfinite(values[np.arange(len(best)), best]).tolist()
    token_ids = logits.argmax(dim=-1)
    return token_ids.tolist(), torch.isfinite(logits.gather(1, token_ids[:, None]))[:, 0].tolist()
