"""The ops in plain torch: the oracle of the other implementations, and what runs without them.

A row's bits must not depend on its neighbours. Row-wise torch kernels give that for free; matrix
products do not: MKL takes other kernels for fewer than four rows (per thread). oneDNN with packed
weights was found bit-stable for every number of rows and threads on AVX2 and, but for a single row, on
AVX-512, and is faster as well; hence `row_multiple`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.ops.experts import choose_experts, stack, sum_by_expert
from engine.ops.port import BatchLayout, Linear, LinearStack, Matrices, Routing, StepAttention
from engine.ops.torch_attention import TorchAttention


class TorchOps:
    """Implements `Ops` on any device. With oneDNN where it can run, else with `F.linear`."""

    packing = None
    experts_wait = True
    attention_waits = True

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._uses_onednn = _onednn_can_run(device, dtype)
        self._head_dtype = torch.float32 if device.type == "cpu" else dtype
        self.name = "torch (oneDNN)" if self._uses_onednn else "torch"
        self.row_multiple = _row_multiple(device, self._uses_onednn)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        packed = _reorder(weight) if self._uses_onednn else weight
        return Linear(packed, bias, weight.shape[0])

    def pack_head(self, weight: torch.Tensor) -> Linear:
        """On a CPU the head is kept in float32: twice the memory for logits without ties."""
        return self.pack(weight.to(self._head_dtype), None)

    def pack_gate_up(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return self.pack(weight, bias)

    def pack_gate_ups(self, matrices: Matrices, count: int) -> LinearStack:
        return stack([self.pack_gate_up(matrix, None) for matrix in matrices])

    def pack_downs(self, matrices: Matrices, count: int) -> LinearStack:
        return stack([self.pack(matrix, None) for matrix in matrices])

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        if not self._uses_onednn:
            return F.linear(x, linear.weight, linear.bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, linear.weight, linear.bias, "none", [], ""
        )
        return product

    def gated(self, x: torch.Tensor, gate_up: Linear) -> torch.Tensor:
        gate, up = self.linear(x, gate_up).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def route(self, logits: torch.Tensor, num_chosen: int, *, normalizes: bool) -> Routing:
        return choose_experts(logits, num_chosen, normalizes=normalizes)

    def experts(
        self, x: torch.Tensor, routing: Routing, gate_up: LinearStack, down: LinearStack, first: int = 0
    ) -> torch.Tensor:
        return sum_by_expert(self, x, routing, gate_up, down, first=first)

    def logits(self, x: torch.Tensor, head: Linear) -> torch.Tensor:
        return self.linear(x.to(self._head_dtype), head).float()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def rms_norm_(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        x.copy_(self.rms_norm(x, weight, eps))

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual.add_(x)
        return self.rms_norm(total, weight, eps), total

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        swapped = torch.roll(x, x.shape[-1] // 2, -1).mul_(sin.unsqueeze(1))
        return x.mul_(cos.unsqueeze(1)).add_(swapped)

    def attention(self, layout: BatchLayout, kv_blocks: torch.Tensor) -> StepAttention:
        return TorchAttention(layout, kv_blocks)


def _onednn_can_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this type here; it refuses bfloat16 on CPUs without support."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if dtype is torch.bfloat16:
        supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return supported
    return dtype is torch.float32


def _reorder(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed


def _row_multiple(device: torch.device, uses_onednn: bool) -> int:
    if device.type != "cpu":
        return 1
    return 2 if uses_onednn else 8
