"""The ops port on Triton kernels. Matrix products stay torch's: the vendors' libraries are hard to beat."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.ops.experts import choose_experts, stack, sum_by_expert
from engine.ops.port import BatchLayout, Linear, LinearStack, Matrices, RotatingAttention, Routing
from engine.ops.triton import launch
from engine.ops.triton.attention import TritonAttention
from engine.ops.triton.experts import group_downs, group_gate_ups, sum_grouped
from engine.ops.triton.tuning import Tuning


class TritonOps:
    """Implements `Ops` for tensors of one dtype on one GPU."""

    packing = None
    name: str = "Triton"
    row_multiple = 1
    attention_waits = False

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self.experts_wait = not tuning.groups_experts

    @classmethod
    def create(cls, *, dtype: torch.dtype, head_dim: int) -> TritonOps:
        """For the GPU that is current. Raises `StartupError`, whose one line says why it cannot be."""
        return cls(Tuning.for_device(dtype, head_dim))

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return Linear(weight, bias, weight.shape[0])

    def pack_head(self, weight: torch.Tensor) -> Linear:
        return self.pack(weight, None)

    def pack_gate_up(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return self.pack(weight, bias)

    def pack_gate_ups(self, matrices: Matrices, count: int) -> LinearStack:
        if self._tuning.groups_experts:
            return group_gate_ups(matrices, count)
        return stack([self.pack_gate_up(matrix, None) for matrix in matrices])

    def pack_downs(self, matrices: Matrices, count: int) -> LinearStack:
        if self._tuning.groups_experts:
            return group_downs(matrices, count)
        return stack([self.pack(matrix, None) for matrix in matrices])

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        return F.linear(x, linear.weight, linear.bias)

    def gated(self, x: torch.Tensor, gate_up: Linear) -> torch.Tensor:
        return self.multiply_gate(self.linear(x, gate_up))

    def multiply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[rows, 2 * width], gate first -> silu(gate) * up, [rows, width]."""
        output = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        launch.multiply_by_gate(output, gate_up)
        return output

    def route(self, logits: torch.Tensor, num_chosen: int, *, normalizes: bool) -> Routing:
        return choose_experts(logits, num_chosen, normalizes=normalizes)

    def experts(
        self, x: torch.Tensor, routing: Routing, gate_up: LinearStack, down: LinearStack, first: int = 0
    ) -> torch.Tensor:
        if self._tuning.groups_experts:
            return sum_grouped(self.multiply_gate, x, routing, gate_up, down, first=first)
        return sum_by_expert(self, x, routing, gate_up, down, first=first)

    def logits(self, x: torch.Tensor, head: Linear) -> torch.Tensor:
        if x.dtype is torch.float32:
            return self.linear(x, head)
        if x.device.type == "cuda":
            return torch.mm(x, head.weight.t(), out_dtype=torch.float32)
        return F.linear(x.float(), head.weight.float())

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        launch.norm(output, x, weight, eps)
        return output

    def rms_norm_(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        launch.norm_in_place(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        launch.add_and_norm(x, residual, weight, eps)
        return x, residual

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        launch.rotate(x, cos, sin)
        return x

    def attention(self, layout: BatchLayout, kv_blocks: torch.Tensor) -> RotatingAttention:
        return TritonAttention(layout, kv_blocks, self._tuning)
