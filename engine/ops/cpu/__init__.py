"""The ops in C++ for x86-64 CPUs: near the machine's limit, and a row's bits depend on nothing but the row.

`CpuOps.create` builds the library for this CPU on first use (a few seconds, cached) and loads it.
"""

from engine.ops.cpu.memory import zeros
from engine.ops.cpu.ops import CpuOps

__all__ = ["CpuOps", "zeros"]
