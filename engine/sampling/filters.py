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
    lowest = torch.zeros(len(params), 1, device=probabilities.device)
    rows = [i for i, p in enumerate(params) if p.top_p < 1.0 or 0 < p.top_k < probabilities.shape[1]]
    if rows:
        lowest[rows] = _ranked_thresholds(probabilities[rows], [params[i] for i in rows])
    min_p = torch.tensor([[p.min_p] for p in params], device=probabilities.device)
    return torch.maximum(lowest, min_p * probabilities.amax(dim=-1, keepdim=True))


def _ranked_thresholds(probabilities: torch.Tensor, params: Items[SamplingParams]) -> torch.Tensor:
    """Rank as few candidates of each row as will do: [rows, 1]."""
    num_candidates = min(NUM_CANDIDATES, probabilities.shape[1])
    best = torch.topk(probabilities, num_candidates).values
    masses = best.cumsum(-1, dtype=torch.float64)
    result = _cut(best, masses, params)
    if num_candidates < probabilities.shape[1]:
        short = [i for i, mass in enumerate(masses[:, -1].tolist()) if _needs_more(params[i], mass)]
        if short:
            ranked = probabilities[short].sort(descending=True).values
            result[short] = _cut(ranked, ranked.cumsum(-1, dtype=torch.float64), [params[i] for i in short])
    return result


def _needs_more(params: SamplingParams, candidate_mass: float) -> bool:
    if params.top_k:
        return params.top_k > NUM_CANDIDATES
    return candidate_mass < params.top_p


def _cut(ranked: torch.Tensor, masses: torch.Tensor, params: Items[SamplingParams]) -> torch.Tensor:
    """Thresholds, [rows, 1], from descending probabilities and their running sums, [rows, ranks]."""
    num_ranks, device = ranked.shape[1], ranked.device
    num_kept = torch.tensor([[min(p.top_k or num_ranks, num_ranks)] for p in params], device=device)
    top_p = torch.tensor([[p.top_p] for p in params], device=device, dtype=torch.float64)
    has_top_k = torch.tensor([[p.top_k > 0] for p in params], device=device)
    # Without top-k the whole distribution has mass 1, whether or not all of it is ranked here.
    mass = torch.where(has_top_k, masses.gather(1, num_kept - 1), 1.0)
    nucleus = torch.searchsorted(masses, top_p * mass) + 1
    num_kept = torch.where(top_p < 1.0, torch.minimum(nucleus, num_kept), num_kept)
    return ranked.gather(1, num_kept - 1)
