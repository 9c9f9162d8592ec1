"""Cuts of a distribution's tail: top-k, top-p and min-p, as one threshold per row.

A token stays when its probability reaches the threshold. A threshold depends on the row's sorted values
alone, never on how a sort orders equal ones; tokens that tie with the last one kept are kept too.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from protocol.generation import SamplingParams

NUM_CANDIDATES = 256
"""Best tokens looked at first; nearly always they hold the nucleus, and a full sort is 20 times dearer."""


def thresholds(probabilities: torch.Tensor, params: Items[SamplingParams]) -> torch.Tensor:
    """The smallest probability that stays, [rows, 1]; 0 where nothing is cut.

    Order, as elsewhere in the field: top-k, then top-p of what top-k left, then min-p.
    """
    result = torch.zeros(len(params), 1, device=probabilities.device)
    ranked_rows = [i for i, p in enumerate(params) if _ranks(p, probabilities.shape[1])]
    if ranked_rows:
        picked = probabilities[ranked_rows]
        cuts = _ranked_thresholds(picked, [params[i] for i in ranked_rows])
        result[ranked_rows] = cuts[:, None]
    min_p = torch.tensor([[p.min_p] for p in params], device=probabilities.device)
    return torch.maximum(result, min_p * probabilities.amax(dim=-1, keepdim=True))


def _ranks(params: SamplingParams, vocab_size: int) -> bool:
    return params.top_p < 1.0 or 0 < params.top_k < vocab_size


def _ranked_thresholds(probabilities: torch.Tensor, params: Items[SamplingParams]) -> torch.Tensor:
    """Sort as few candidates as will do, row by row independent of the others: [rows]."""
    vocab_size = probabilities.shape[1]
    best = torch.topk(probabilities, min(NUM_CANDIDATES, vocab_size)).values
    masses = best.cumsum(-1, dtype=torch.float64)
    cuts = []
    for row, param in enumerate(params):
        if _candidates_suffice(best[row], masses[row], param, vocab_size):
            cuts.append(_cut(best[row], masses[row], param))
        else:
            ranked = probabilities[row].sort(descending=True).values
            cuts.append(_cut(ranked, ranked.cumsum(-1, dtype=torch.float64), param))
    return torch.stack(cuts)


def _candidates_suffice(
    ranked: torch.Tensor, masses: torch.Tensor, params: SamplingParams, vocab_size: int
) -> bool:
    if len(ranked) == vocab_size or 0 < params.top_k <= len(ranked):
        return True
    # With a larger top-k the nucleus is a share of a mass not known yet: at most 1, so 1 is safe.
    return not params.top_k and bool(masses[-1] >= params.top_p)


def _cut(ranked: torch.Tensor, masses: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The threshold of one row from its descending probabilities and their running sums."""
    num_kept = min(params.top_k or len(ranked), len(ranked))
    if params.top_p < 1.0:
        # Without top-k the whole distribution has mass 1, whether or not all of it is ranked here.
        mass = masses[num_kept - 1] if params.top_k else torch.ones_like(masses[0])
        reached = torch.searchsorted(masses[:num_kept], (params.top_p * mass).reshape(1))
        num_kept = min(int(reached) + 1, num_kept)
    return ranked[num_kept - 1]
