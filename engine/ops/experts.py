"""Mixture of experts in plain torch: the routing, and the products of one expert after the other.

    router logits --choose_experts--> experts and weights of each row --sum_by_expert--> their weighted sum

A row's bits must not depend on its neighbours: its experts' results are added up in the order of the
experts, and how often an expert is chosen changes only how many rows its products have, which is what
the ops' matrix products are indifferent to, with `row_multiple`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from engine.ops.port import Linear, LinearStack, Ops, Routing


def stack(linears: Sequence[Linear]) -> LinearStack:
    """Each in memory of its own."""
    return LinearStack([linear.weight for linear in linears], linears[0].out_features)


def choose_experts(logits: torch.Tensor, num_chosen: int, *, normalizes: bool) -> Routing:
    """As `Ops.route`."""
    odds, experts = torch.softmax(logits, dim=-1).sort(dim=-1, descending=True, stable=True)
    odds, experts = odds[:, :num_chosen], experts[:, :num_chosen]
    if normalizes:
        odds = odds / odds.sum(dim=-1, keepdim=True)
    experts, order = experts.sort(dim=-1)
    return Routing(experts, odds.gather(1, order))


def sum_by_expert(
    ops: Ops, x: torch.Tensor, routing: Routing, gate_up: LinearStack, down: LinearStack, *, first: int
) -> torch.Tensor:
    """`Ops.experts` by the two products of each expert that has rows. On a GPU it waits for the routing."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    weights = routing.weights.view(-1, 1)
    for expert, places in _by_expert(routing.experts - first, len(gate_up)):
        rows = places // routing.experts.shape[1]
        taken = x.index_select(0, _padded(rows, ops.row_multiple))
        result = ops.linear(ops.gated(taken, gate_up[expert]), down[expert])[: len(rows)]
        total.index_add_(0, rows, result.float() * weights.index_select(0, places))
    return total.to(x.dtype)


def _by_expert(experts: torch.Tensor, num_experts: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Each of the first `num_experts` that is in `experts`, and where in it, in order of rows."""
    flat = experts.reshape(-1).cpu().numpy()
    order = np.argsort(flat, kind="stable")
    bounds = np.searchsorted(flat[order], np.arange(num_experts + 1))
    places = torch.from_numpy(order).to(experts.device)
    for expert in np.flatnonzero(np.diff(bounds)):
        yield int(expert), places[bounds[expert] : bounds[expert + 1]]


def _padded(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    num_missing = -len(rows) % multiple
    return torch.cat([rows, rows[-1:].expand(num_missing)]) if num_missing else rows
