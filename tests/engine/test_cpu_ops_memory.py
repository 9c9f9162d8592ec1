"""The kernels under AddressSanitizer: no byte outside an array is read or written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from compiled_ops import COMPILED_OPS

from engine.machine import find_compiler, read_cpu_flags
from engine.ops.cpu.build import build_for
from engine.ops.cpu.instruction_sets import InstructionSet, usable

HERE = Path(__file__).parent
SANITIZED = ("-fsanitize=address", "-fno-omit-frame-pointer", "-O1", "-g1")
RUN = """
import sys, pytest, cpp_variants
from test_cpu_ops_memory import sanitized
cpp_variants.VARIANTS = {sanitized().name: sanitized()}
sys.exit(pytest.main(sys.argv[1:]))
"""


def sanitized() -> InstructionSet:
    """Only what this CPU runs itself: compilers take minutes over emulated vectors with checks."""
    best = usable(read_cpu_flags())[0]
    return InstructionSet(f"asan-{best.name}", best.cpu_flags, (*best.compiler_flags, *SANITIZED))


def build_sanitized() -> Path:
    """Fill the cache (not under the sanitizer: it would slow the compiler down) and find its runtime."""
    compiler = find_compiler()
    if compiler is None or not usable(read_cpu_flags()):
        pytest.skip("the C++ ops need a compiler and a CPU with AVX2")
    found = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    runtime = Path(found.stdout.strip())
    if not runtime.is_absolute():
        pytest.skip(f"{compiler.name} comes without AddressSanitizer")
    build_for(sanitized(), COMPILED_OPS, compiler)
    return runtime


@pytest.mark.timeout(600)
def test_no_kernel_touches_memory_that_is_not_its_own() -> None:
    environment = {
        **os.environ,
        "LD_PRELOAD": str(build_sanitized()),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python and torch keep what they have until the end
        "PYTHONPATH": f"{HERE}:{HERE.parents[1]}",
    }
    wanted = (
        "(right_for_every_shape and 50) or linears or norms or padding or drawn or cutting"
        " or (chunks and 100)"
    )
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(HERE / "test_cpu_ops.py"), "-q", "-x", "-k", wanted],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
