"""The ops port on the C++ kernels: checks and unpacks tensors, allocates results, calls.

A kernel's result for a row depends on that row (and its sequence's keys) alone, so every property
that `engine.ops.port` promises holds for any number of rows and threads, in float32 and bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from engine.machine import find_compiler, read_cpu_flags
from engine.ops.cpu.attention import MAX_HEAD_DIM, CpuAttention
from engine.ops.cpu.build import build
from engine.ops.cpu.instruction_sets import usable
from engine.ops.cpu.library import Epilogue, Library
from engine.ops.cpu.memory import zeros
from engine.ops.port import (
    BatchLayout,
    Linear,
    LinearStack,
    Matrices,
    Recording,
    Routing,
    StepAttention,
)
from protocol.errors import StartupError
from protocol.generation import SamplingParams

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_DRAW_ROW = np.dtype(
    {
        "names": ["noise", "top_p", "temperature", "min_p", "top_k"],
        "formats": ["f8", "f8", "f4", "f4", "i4"],
        "itemsize": 32,
    }
)
"""`DrawRow` in draw.h."""
PACKING_VERSION = 1
"""Raised with every change of how a matrix is packed: packed weights are kept in files."""


class CpuOps:
    """Implements `Ops` for tensors of one dtype on the CPU. Used by one thread at a time."""

    row_multiple = 1
    experts_wait = False
    attention_waits = False

    def __init__(self, library: Library, dtype: torch.dtype) -> None:
        self.name = f"C++ {library.instruction_set}"
        self._library = library
        self.packing = f"{library.instruction_set}-v{PACKING_VERSION}"
        self._torch_dtype = dtype
        self._dtype = DTYPES[dtype]

    @classmethod
    def create(
        cls,
        cache_dir: Path,
        *,
        dtype: torch.dtype,
        head_dim: int,
        num_threads: int,
        cpu_flags: frozenset[str] | None = None,
        compiler: Path | None = None,
    ) -> CpuOps:
        """Build (unless cached) and load the kernels for the best instruction set of this CPU.

        Raises `StartupError`, whose one line says why they cannot be used; torch's ops always can.
        """
        if dtype not in DTYPES:
            raise StartupError(f"the C++ ops compute in float32 and bfloat16, not in {dtype}")
        if head_dim % 16 or head_dim > MAX_HEAD_DIM:
            raise StartupError(
                f"the C++ ops take head sizes that are multiples of 16 up to {MAX_HEAD_DIM}, not {head_dim}"
            )
        candidates = usable(read_cpu_flags() if cpu_flags is None else cpu_flags)
        if not candidates:
            raise StartupError("the C++ ops need a CPU with AVX2 and FMA")
        compiler = compiler or find_compiler()
        if compiler is None:
            raise StartupError("the C++ ops need a compiler: install g++ or clang++")
        return cls(Library(build(candidates, cache_dir, compiler), num_threads), dtype)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return self._pack([weight], [] if bias is None else [bias])

    def pack_head(self, weight: torch.Tensor) -> Linear:
        return self._pack([weight], [])

    def pack_gate_up(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return self._pack(list(weight.chunk(2)), [] if bias is None else list(bias.chunk(2)))

    def pack_gate_ups(self, matrices: Matrices, count: int) -> LinearStack:
        return _stack((self.pack_gate_up(matrix, None) for matrix in matrices), count)

    def pack_downs(self, matrices: Matrices, count: int) -> LinearStack:
        return _stack((self.pack(matrix, None) for matrix in matrices), count)

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        return self._multiply(x, linear, Epilogue.STORE, self._torch_dtype)

    def gated(self, x: torch.Tensor, gate_up: Linear) -> torch.Tensor:
        return self._multiply(x, gate_up, Epilogue.GATE, self._torch_dtype)

    def route(self, logits: torch.Tensor, num_chosen: int, *, normalizes: bool) -> Routing:
        shape = (len(logits), num_chosen)
        experts = self._library.empty(shape, torch.int64)
        weights = self._library.empty(shape, torch.float32)
        self._library.route(
            0,
            logits.data_ptr(),
            experts.data_ptr(),
            weights.data_ptr(),
            *logits.shape,
            num_chosen,
            normalizes,
        )
        return Routing(experts, weights)

    def experts(
        self, x: torch.Tensor, routing: Routing, gate_up: LinearStack, down: LinearStack, first: int = 0
    ) -> torch.Tensor:
        out = self._library.empty(tuple(x.shape), x.dtype)
        self._library.experts(
            self._dtype,
            x.data_ptr(),
            routing.experts.data_ptr(),
            routing.weights.data_ptr(),
            _memory(gate_up).data_ptr(),
            _memory(down).data_ptr(),
            out.data_ptr(),
            *routing.experts.shape,
            first,
            len(down),
            down.out_features,
            gate_up.out_features,
            x.stride(0),
        )
        return out

    def logits(self, x: torch.Tensor, head: Linear) -> torch.Tensor:
        return self._multiply(x, head, Epilogue.FLOAT32, torch.float32)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = self._library.empty(tuple(x.shape), x.dtype)
        self._normalise(x, None, weight, out, eps)
        return out

    def rms_norm_(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        self._normalise(x, None, weight, x, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._normalise(x, residual, weight, x, eps)
        return x, residual

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, heads, head_dim = x.shape
        self._library.rope(
            self._dtype,
            x.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            rows,
            heads,
            head_dim,
            x.stride(0),
            x.stride(1),
            cos.stride(0),
        )
        return x

    def attention(self, layout: BatchLayout, kv_blocks: torch.Tensor) -> StepAttention:
        return CpuAttention(self._library, self._dtype, layout, kv_blocks)

    def draw(
        self,
        logits: torch.Tensor,
        params: Sequence[SamplingParams],
        noise: npt.NDArray[np.float64],
    ) -> list[int]:
        rows = np.zeros(len(params), dtype=_DRAW_ROW)
        rows["noise"] = noise
        rows["top_p"] = [p.top_p for p in params]
        rows["temperature"] = [p.temperature for p in params]
        rows["min_p"] = [p.min_p for p in params]
        rows["top_k"] = [min(p.top_k, logits.shape[1]) for p in params]
        tokens = np.empty(len(params), dtype=np.int32)
        self._library.draw(
            0, logits.data_ptr(), rows.ctypes.data, tokens.ctypes.data, *logits.shape, logits.stride(0)
        )
        chosen: list[int] = tokens.tolist()
        return chosen

    def record(self, work: Callable[[], torch.Tensor]) -> Recording:
        with self._library.recording() as tape:
            output = work()
        return Recording(output, tape.replay)

    def _multiply(
        self, x: torch.Tensor, linear: Linear, epilogue: Epilogue, dtype: torch.dtype
    ) -> torch.Tensor:
        rows, in_features = x.shape
        out = self._library.empty((rows, linear.out_features), dtype)
        self._library.linear(
            self._dtype,
            x.data_ptr(),
            linear.weight.data_ptr(),
            0 if linear.bias is None else linear.bias.data_ptr(),
            out.data_ptr(),
            rows,
            linear.out_features,
            in_features,
            x.stride(0),
            linear.out_features,
            epilogue,
        )
        return out

    def _normalise(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        out: torch.Tensor,
        eps: float,
    ) -> None:
        """`x` and `out` are [rows, width] or [rows, heads, width]; `residual` is [rows, width]."""
        rows, width = x.shape[0], x.shape[-1]
        heads = x.shape[1] if x.dim() == 3 else 1
        self._library.rms_norm(
            self._dtype,
            x.data_ptr(),
            weight.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            out.data_ptr(),
            rows,
            heads,
            width,
            x.stride(0),
            x.stride(-2),
            out.stride(0),
            out.stride(-2),
            0 if residual is None else residual.stride(0),
            eps,
        )

    def _pack(self, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> Linear:
        """One matrix, or gate and up, whose columns share each panel: [panels, steps, columns, depth]."""
        out_features, in_features = weights[0].shape
        width = self._library.panel_columns // len(weights)
        depth = self._library.step_depth(self._dtype)
        num_panels, num_steps = -(-out_features // width), -(-in_features // depth)
        panels = zeros((num_panels, num_steps, width * len(weights), depth), self._torch_dtype)
        pointers = [weight.data_ptr() for weight in weights]
        self._library.pack(
            self._dtype,
            pointers[0],
            pointers[1] if len(pointers) > 1 else 0,
            out_features,
            in_features,
            weights[0].stride(0),
            panels.data_ptr(),
        )
        return Linear(panels, _pack_biases(biases, num_panels, width), out_features)


def _pack_biases(biases: list[torch.Tensor], num_panels: int, width: int) -> torch.Tensor | None:
    """[panels, columns] in float32, in the panels' order."""
    if not biases:
        return None
    padded = torch.zeros(len(biases), num_panels * width)
    for row, bias in zip(padded, biases, strict=True):
        row[: len(bias)] = bias
    return padded.view(len(biases), num_panels, width).transpose(0, 1).contiguous()


def _stack(linears: Iterable[Linear], count: int) -> LinearStack:
    """One by one into one piece of memory: [count, panels, steps, columns, depth]."""
    stack: torch.Tensor | None = None
    for index, linear in enumerate(linears):
        if stack is None:
            stack = zeros((count, *linear.weight.shape), linear.weight.dtype)
        stack[index] = linear.weight
        out_features = linear.out_features
    if stack is None:
        raise ValueError("there are no experts to stack")
    return LinearStack(stack, out_features)


def _memory(stack: LinearStack) -> torch.Tensor:
    return cast(torch.Tensor, stack.weights)
