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


def group_gate_ups(matrices: Matrices, count: int) -> LinearStack:
    """Each [2 * width, in], gate above up; the widths padded with zeros, which add nothing."""
    return _stack((_pad_rows(matrix.view(2, -1, matrix.shape[1])) for matrix in matrices), count)


def group_downs(matrices: Matrices, count: int) -> LinearStack:
    """Each [out, width]; the widths padded as those of gate and up."""
    return _stack((F.pad(matrix, (0, -matrix.shape[1] % ALIGNMENT)) for matrix in matrices), count)


def _pad_rows(gate_up: torch.Tensor) -> torch.Tensor:
    return F.pad(gate_up, (0, 0, 0, -gate_up.shape[1] % ALIGNMENT)).flatten(0, 1)


def _stack(matrices: Matrices, count: int) -> LinearStack:
    """One by one into one tensor, [count, rows, columns]."""
    stack: torch.Tensor | None = None
    for index, matrix in enumerate(matrices):
        if stack is None:
            stack = matrix.new_empty(count, *matrix.shape)
        stack[index] = matrix
    if stack is None:
        raise ValueError("there are no experts to stack")
    return LinearStack(stack, stack.shape[1])


def sum_grouped(
    multiply_gate: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    routing: Routing,
    gate_up: LinearStack,
    down: LinearStack,
    *,
    first: int,
) -> torch.Tensor:
    """`Ops.experts` of stacks that were grouped."""
    num_chosen, num_experts = routing.experts.shape[1], len(gate_up)
    experts = routing.experts.flatten() - first
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
