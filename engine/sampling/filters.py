"""Cuts of a distribution's tail: top-k, top-p and min-p, as one threshold per row.

A token stays when its probability reaches the threshold. A threshold depends on the row's sorted values
alone, never on how a sort orders equal ones; tokens that tie with the last one kept are kept too.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from protocol.generation import SamplingParams

CANDIDATE_STEPS = (256, 4096)
"""How many of the best tokens are ranked before all are: nearly always the first step holds the nucleus,
and sorting a whole vocabulary is 20 times dearer."""


def thresholds(probabilities: torch.Tensor, params: Items[SamplingParams]) -> torch.Tensor:
    """The smallest probability that stays, [rows, 1]; 0 where nothing is cut.

    Order, as elsewhere in the field: top-k, then top-p of what top-k left, then min-p.
    """
    lowest = torch.zeros(len(params), 1, device=probabilities.device)
    rows = [i for i, p in enumerate(params) if p.top_p < 1.0 or 0 < p.top_k < probabilities.shape[1]]
    if rows:
        lowest[rows] = _ranked_thresholds(probabilities[rows], [params[i] for i in rows])
    min_p = torch.tensor([[p.min_p] for p in params], device=probabilities.device)
    return torch.maximum(lowest, min_p * probabilities.amax(dim=-1, keepdim=True))


def _ranked_thresholds(probabilities: torch.Tensor, params: Items[SamplingParams]) -> torch.Tensor:
    """Rank as few candidates of each row as will do: [rows, 1]."""
    vocab_size = probabilities.shape[1]
    result = torch.empty(len(params), 1, device=probabilities.device)
    pending = list(range(len(params)))
    for width in (*(step for step in CANDIDATE_STEPS if step < vocab_size), vocab_size):
        rows = probabilities if len(pending) == len(params) else probabilities[pending]
        ranked = torch.topk(rows, width).values
        masses = ranked.cumsum(-1, dtype=torch.float64)
        result[pending] = _cut(ranked, masses, [params[i] for i in pending])
        if width < vocab_size:
            ranked_mass = zip(pending, masses[:, -1].tolist(), strict=True)
            pending = [i for i, mass in ranked_mass if _needs_more(params[i], width, mass)]
        if not pending:
            break
    return result


def _needs_more(params: SamplingParams, num_ranked: int, ranked_mass: float) -> bool:
    if params.top_k > 0:
        return params.top_k > num_ranked
    return ranked_mass < params.top_p


def _cut(ranked: torch.Tensor, masses: torch.Tensor, params: Items[SamplingParams]) -> torch.Tensor:
    """Thresholds, [rows, 1], from descending probabilities and their running sums, [rows, ranks]."""
    num_ranks, device = ranked.shape[1], ranked.device
    top_k = [[min(p.top_k, num_ranks) if p.top_k > 0 else num_ranks] for p in params]
    num_kept = torch.tensor(top_k, device=device)
    top_p = torch.tensor([[p.top_p] for p in params], device=device, dtype=torch.float64)
    has_top_k = torch.tensor([[p.top_k > 0] for p in params], device=device)
    # Without top-k the whole distribution has mass 1, whether or not all of it is ranked here.
    mass = torch.where(has_top_k, masses.gather(1, num_kept - 1), 1.0)
    nucleus = torch.searchsorted(masses, top_p * mass) + 1
    num_kept = torch.where(top_p < 1.0, torch.minimum(nucleus, num_kept), num_kept)
    return ranked.gather(1, num_kept - 1)
