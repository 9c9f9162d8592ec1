"""The C++ ops in every form that this machine can run, those of wider CPUs included.

The sixteen-lane forms run the code of AVX-512 (its panels, tiles and packing, and the bfloat16 pairs) on
AVX2: the compiler splits the vectors, and two intrinsics have a stand-in. What stays untried here is
those intrinsics themselves, and that a real CPU takes the instructions.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from compiled_ops import COMPILED_OPS

from engine.machine import find_compiler, read_cpu_flags
from engine.ops.cpu import CpuOps
from engine.ops.cpu.build import build_for
from engine.ops.cpu.instruction_sets import InstructionSet, usable
from engine.ops.cpu.library import Library

_AVX2 = ("-mavx2", "-mfma", "-O1", "-DSPLITSERVE_LANES=16")
EMULATED = (
    InstructionSet("sixteen-lanes", frozenset({"avx2"}), (*_AVX2, "-DSPLITSERVE_NATIVE_BF16=0")),
    InstructionSet("sixteen-lanes-pairs", frozenset({"avx2"}), (*_AVX2, "-DSPLITSERVE_NATIVE_BF16=1")),
)
VARIANTS = {s.name: s for s in (*usable(read_cpu_flags()), *EMULATED)}


@cache
def variant_ops(name: str, dtype: torch.dtype, num_threads: int = 2) -> CpuOps:
    """Skips the test where nothing can be built or run."""
    compiler = find_compiler()
    if compiler is None or not usable(read_cpu_flags()):
        pytest.skip("the C++ ops need a compiler and a CPU with AVX2")
    return CpuOps(Library(build_for(VARIANTS[name], COMPILED_OPS, compiler), num_threads), dtype)


def best_ops(dtype: torch.dtype, num_threads: int = 2) -> CpuOps:
    """What users of this machine get."""
    return variant_ops(next(iter(VARIANTS)), dtype, num_threads)
