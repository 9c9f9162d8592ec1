"""Which instruction sets are the kernels written for, and which of them does a CPU have?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_AVX2 = frozenset({"avx2", "fma"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One way to compile the kernels, and the CPU flags (as Linux names them) that running it takes."""

    name: str
    cpu_flags: frozenset[str]
    compiler_flags: tuple[str, ...]


def _instruction_set(name: str, cpu_flags: frozenset[str], lanes: int, native_bf16: bool) -> InstructionSet:
    machine = tuple(f"-m{flag.replace('_', '')}" for flag in sorted(cpu_flags))
    wide = ("-mprefer-vector-width=512",) if lanes == 16 else ()
    shape = (f"-DSPLITSERVE_LANES={lanes}", f"-DSPLITSERVE_NATIVE_BF16={int(native_bf16)}")
    return InstructionSet(name, cpu_flags, (*machine, *wide, *shape))


INSTRUCTION_SETS = (
    _instruction_set("avx512bf16", _AVX512 | {"avx512_bf16"}, lanes=16, native_bf16=True),
    _instruction_set("avx512", _AVX512, lanes=16, native_bf16=False),
    _instruction_set("avx2", _AVX2, lanes=8, native_bf16=False),
)
"""Best first. AVX-512-BF16 multiplies bfloat16 pairs; the others widen bfloat16 to float32 in registers."""


def usable(cpu_flags: Iterable[str]) -> tuple[InstructionSet, ...]:
    """What a CPU with these flags can run, best first; empty on other kinds of CPU."""
    available = frozenset(cpu_flags)
    return tuple(s for s in INSTRUCTION_SETS if s.cpu_flags <= available)
