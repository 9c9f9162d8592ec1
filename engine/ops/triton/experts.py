"""Mixture of experts as grouped matrix products: the device alone knows how many rows an expert has.

Torch has them for bfloat16 on GPUs of compute capability 9 and 10; elsewhere it would wait for the routing
and multiply one expert after the other, which `engine.ops.experts` does as well. Work and memory depend on
the number of rows only, so that it can be captured. Rows of experts that are elsewhere come last: their
products are never written, and what memory holds in their place is cleared, since it may be NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F

from engine.ops.port import LinearStack, Matrices, Routing

ALIGNMENT = 8
"""Grouped products take rows of a multiple of 16 bytes."""


def group_gate_ups(matrices: Matrices) -> LinearStack:
    """Each [2 * width, in], gate above up; the widths padded with zeros, which add nothing."""
    halves = torch.stack([matrix.unflatten(0, (2, -1)) for matrix in matrices])
    weights = F.pad(halves, (0, 0, 0, -halves.shape[2] % ALIGNMENT)).flatten(1, 2).contiguous()
    return LinearStack(weights, weights.shape[1])


def group_downs(matrices: Matrices) -> LinearStack:
    """Each [out, width]; the widths padded as those of gate and up."""
    weights = torch.stack(list(matrices))
    return LinearStack(F.pad(weights, (0, -weights.shape[2] % ALIGNMENT)).contiguous(), weights.shape[1])


def sum_grouped(
    multiply_gate: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    routing: Routing,
    gate_up: LinearStack,
    down: LinearStack,
) -> torch.Tensor:
    """`Ops.experts` of stacks that were grouped."""
    num_chosen, num_experts = routing.experts.shape[1], len(gate_up)
    experts = routing.experts.flatten()
    is_here = (experts >= 0) & (experts < num_experts)
    sorted_experts, places = experts.masked_fill(~is_here, num_experts).sort(stable=True)
    bounds = torch.arange(num_experts, device=x.device)
    ends = torch.searchsorted(sorted_experts, bounds, right=True, out_int32=True)
    inner = multiply_gate(_multiply(x.index_select(0, places // num_chosen), gate_up, ends))
    result = _multiply(inner, down, ends)
    placed = torch.empty_like(result).index_copy_(0, places, result).float()
    weighted = (placed * routing.weights.view(-1, 1)).masked_fill_(~is_here.unsqueeze(1), 0)
    return _add_in_order(weighted.view(len(x), num_chosen, -1)).to(x.dtype)


def _multiply(x: torch.Tensor, stack: LinearStack, ends: torch.Tensor) -> torch.Tensor:
    """`x` [rows, in] in order of experts, up to `ends` int32 [experts] of each -> [rows, out]."""
    weights = cast(torch.Tensor, stack.weights)
    return F.grouped_mm(x, weights.transpose(1, 2), offs=ends)


def _add_in_order(parts: torch.Tensor) -> torch.Tensor:
    """[rows, parts, width] -> [rows, width]; what torch's own sum does depends on the shape."""
    total, *others = parts.unbind(1)
    for part in others:
        total = total + part
    return total
