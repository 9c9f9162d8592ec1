"""How fast can this machine multiply and read? What the engine's steps are measured against."""

from __future__ import annotations

import ctypes
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from cpu_engine import Step

from engine.machine import find_compiler, read_cpu_flags
from engine.model import ModelConfig
from engine.ops.cpu import CpuOps, zeros
from engine.ops.cpu.build import FLAGS
from engine.ops.cpu.instruction_sets import usable
from engine.ops.cpu.library import Library
from protocol.ports import Clock

SOURCE = Path(__file__).with_name("cpu_limits.cpp")
GEMM_ROWS = 512
READ_BYTES = 512 << 20
"""More than any cache holds."""
PIECE_BYTES = 1 << 20


def build_library(folder: Path) -> Path:
    """`cpu_limits.cpp` compiled for this CPU as the ops are."""
    compiler, sets = find_compiler(), usable(read_cpu_flags())
    if compiler is None or not sets:
        raise SystemExit("bench-cpu needs a C++ compiler and a CPU with AVX2")
    library = folder / "cpu-limits.so"
    subprocess.run([compiler, *FLAGS, *sets[0].compiler_flags, SOURCE, "-o", library], check=True)
    return library


class Machine:
    """Measures limits; one sample per call, so that samples can take turns with what they limit."""

    def __init__(
        self, library: Path, ops: CpuOps, config: ModelConfig, num_threads: int, clock: Clock
    ) -> None:
        self._clock = clock
        self._functions = ctypes.CDLL(str(library))
        self._functions.limits_multiply.restype = ctypes.c_int64
        self._functions.splitserve_pool_create.restype = ctypes.c_void_p
        self._pool = ctypes.c_void_p(self._functions.splitserve_pool_create(num_threads))
        self._num_threads = num_threads
        self._ops = ops
        self._area = zeros((READ_BYTES,), torch.uint8).fill_(1)
        hidden, inner = config.hidden_size, config.intermediate_size
        heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        attended = config.num_heads * config.head_dim
        self._shapes = [(hidden, heads), (attended, hidden), (hidden, 2 * inner), (inner, hidden)]
        self._weights = [
            ops.pack(torch.randn(n, k).mul_(k**-0.5).to(torch.bfloat16), None) for k, n in self._shapes
        ]

    def multiply(self) -> float:
        """FLOP/s of multiply-adds that touch nothing but registers, bfloat16 as the kernels do it."""
        started_s = self._clock()
        num_units, rounds = 8 * self._num_threads, 200_000
        done: int = self._functions.limits_multiply(
            self._pool, 1, ctypes.c_int64(num_units), ctypes.c_int64(rounds)
        )
        return done / (self._clock() - started_s)

    def product(self, shape: int) -> float:
        """FLOP/s of the ops' own product of GEMM_ROWS rows at one of the model's shapes."""
        k, n = self._shapes[shape]
        x = torch.randn(GEMM_ROWS, k).to(torch.bfloat16)
        started_s = self._clock()
        self._ops.linear(x, self._weights[shape])
        return 2 * GEMM_ROWS * k * n / (self._clock() - started_s)

    def torch_product(self, shape: int) -> float:
        """FLOP/s of torch's float32 product of the same size: a yardstick that is not our own."""
        k, n = self._shapes[shape]
        x, weight = torch.randn(GEMM_ROWS, k), torch.randn(k, n)
        started_s = self._clock()
        torch.mm(x, weight)
        return 2 * GEMM_ROWS * k * n / (self._clock() - started_s)

    def best_product(self) -> float:
        """The best of the model's shapes, whoever multiplies."""
        shapes = range(len(self._shapes))
        return max(*map(self.torch_product, shapes), *map(self.product, shapes))

    def read(self, piece_bytes: int = PIECE_BYTES) -> float:
        """Bytes/s read from memory, in order when pieces are long and scattered when they are short."""
        offsets = list(range(0, READ_BYTES - piece_bytes + 1, piece_bytes))
        if piece_bytes < PIECE_BYTES:
            random.Random(0).shuffle(offsets)
        array = (ctypes.c_int64 * len(offsets))(*offsets)
        count, size = ctypes.c_int64(len(offsets)), ctypes.c_int64(piece_bytes)
        started_s = self._clock()
        self._functions.limits_read(self._pool, ctypes.c_void_p(self._area.data_ptr()), array, count, size)
        return len(offsets) * piece_bytes / (self._clock() - started_s)


@dataclass(frozen=True)
class Roofline:
    """The least time that a step can take: the products, or reading the weights; then attention, or
    reading its keys and values.
    """

    flops_per_s: float
    bytes_per_s: float
    config: ModelConfig
    itemsize: int

    def step_s(self, step: Step) -> float:
        c = self.config
        heads = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        layer = c.hidden_size * (heads + 3 * c.intermediate_size)
        vocabulary = c.vocab_size * c.hidden_size
        products = 2 * (step.num_rows * c.num_layers * layer + step.num_sequences * vocabulary)
        weights_bytes = (c.num_layers * layer + vocabulary) * self.itemsize
        num_seen = step.num_tokens * (2 * step.context - step.num_tokens + 1) // 2
        attention = 4 * c.num_layers * c.num_heads * c.head_dim * num_seen * step.num_sequences
        kv_values = 2 * c.num_layers * c.num_kv_heads * c.head_dim * step.context * step.num_sequences
        return self._least_s(products, weights_bytes) + self._least_s(attention, kv_values * self.itemsize)

    def _least_s(self, flops: int, num_bytes: int) -> float:
        return max(flops / self.flops_per_s, num_bytes / self.bytes_per_s)


def no_math_ops(library: Path, num_threads: int) -> CpuOps:
    """Ops that return at once with whatever was in the memory."""
    return CpuOps(Library(library, num_threads), torch.bfloat16)
