"""The ops port on the C++ kernels: checks and unpacks tensors, allocates results, calls.

A kernel's result for a row depends on that row (and its sequence's keys) alone, so every property
that `engine.ops.port` promises holds for any number of rows and threads, in float32 and bfloat16.
"""

from __future__ import annotations

from pathlib import Path

import torch

from engine.ops.cpu.attention import CpuAttention
from engine.ops.cpu.build import build, find_compiler
from engine.ops.cpu.instruction_sets import read_cpu_flags, usable
from engine.ops.cpu.library import Epilogue, Library
from engine.ops.cpu.memory import zeros
from engine.ops.port import BatchLayout, Linear, StepAttention
from protocol.errors import StartupError

DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class CpuOps:
    """Implements `Ops` for tensors of one dtype on the CPU. Used by one thread at a time."""

    row_multiple = 1

    def __init__(self, library: Library, dtype: torch.dtype) -> None:
        self._library = library
        self._torch_dtype = dtype
        self._dtype = DTYPES[dtype]

    @classmethod
    def create(
        cls,
        cache_dir: Path,
        *,
        dtype: torch.dtype,
        num_threads: int,
        cpu_flags: frozenset[str] | None = None,
        compiler: Path | None = None,
    ) -> CpuOps:
        """Build (unless cached) and load the kernels for the best instruction set of this CPU.

        Raises `StartupError`, whose message is one line that says why not; torch's ops always work.
        """
        if dtype not in DTYPES:
            raise StartupError(f"the C++ ops compute in float32 and bfloat16, not in {dtype}")
        candidates = usable(read_cpu_flags() if cpu_flags is None else cpu_flags)
        if not candidates:
            raise StartupError("the C++ ops need a CPU with AVX2 and FMA")
        compiler = compiler or find_compiler()
        if compiler is None:
            raise StartupError("the C++ ops need a compiler: install g++ or clang++")
        return cls(Library(build(candidates[0], cache_dir, compiler), num_threads), dtype)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        out_features, in_features = weight.shape
        packed = self._empty_panels(out_features, self._library.panel_columns, in_features)
        self._library.pack(
            self._dtype, weight.data_ptr(), 0, out_features, in_features, weight.stride(0), packed.data_ptr()
        )
        return Linear(packed, self._pad_bias(bias, packed), out_features)

    def pack_head(self, weight: torch.Tensor) -> Linear:
        return self.pack(weight, None)

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        return self._multiply(x, linear, Epilogue.STORE, self._torch_dtype)

    def logits(self, x: torch.Tensor, head: Linear) -> torch.Tensor:
        return self._multiply(x, head, Epilogue.FLOAT32, torch.float32)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        self._normalise(x, weight, 0, 0, out, eps)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._normalise(x, weight, residual.data_ptr(), residual.stride(0), x, eps)
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

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        stride = gate_up.stride(0)
        pointer = gate_up.data_ptr()
        self._library.silu_mul(self._dtype, pointer, pointer, rows, width, stride, stride)
        return gate_up[:, :width]

    def attention(self, layout: BatchLayout, kv_blocks: torch.Tensor) -> StepAttention:
        return CpuAttention(self._library, self._dtype, layout, kv_blocks)

    def _multiply(
        self, x: torch.Tensor, linear: Linear, epilogue: Epilogue, dtype: torch.dtype
    ) -> torch.Tensor:
        rows, in_features = x.shape
        out = torch.empty(rows, linear.out_features, dtype=dtype)
        self._library.linear(
            self._dtype,
            x.data_ptr(),
            linear.weight.data_ptr(),
            0 if linear.bias is None else linear.bias.data_ptr(),
            0,
            out.data_ptr(),
            rows,
            linear.out_features,
            in_features,
            x.stride(0),
            0,
            linear.out_features,
            epilogue,
        )
        return out

    def _normalise(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        residual: int,
        residual_stride: int,
        out: torch.Tensor,
        eps: float,
    ) -> None:
        """`x` is [rows, width] or [rows, heads, width]."""
        rows, width = x.shape[0], x.shape[-1]
        heads = x.shape[1] if x.dim() == 3 else 1
        self._library.rms_norm(
            self._dtype,
            x.data_ptr(),
            weight.data_ptr(),
            residual,
            out.data_ptr(),
            rows,
            heads,
            width,
            x.stride(0),
            x.stride(-2),
            out.stride(0),
            out.stride(-2),
            residual_stride,
            eps,
        )

    def _empty_panels(self, columns: int, columns_per_panel: int, in_features: int) -> torch.Tensor:
        """[panels, steps, columns of a panel, values of a step]."""
        depth = self._library.step_depth(self._dtype)
        shape = (
            -(-columns // columns_per_panel),
            -(-in_features // depth),
            self._library.panel_columns,
            depth,
        )
        return zeros(shape, self._torch_dtype)

    def _pad_bias(self, bias: torch.Tensor | None, packed: torch.Tensor) -> torch.Tensor | None:
        if bias is None:
            return None
        padded = torch.zeros(packed.shape[0] * packed.shape[2])
        padded[: len(bias)] = bias
        return padded
