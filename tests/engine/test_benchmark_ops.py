"""The benchmark that leaves all arithmetic out must have every op that the engine calls."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_ops_without_arithmetic_have_all_functions() -> None:
    called = re.findall(r'_call\("(\w+)"', (ROOT / "engine/ops/cpu/library.py").read_text())
    left_out = re.findall(
        r"^NOTHING\((\w+)\)", (ROOT / "benchmarks/cpu_limits.cpp").read_text(), re.MULTILINE
    )
    assert len(called) > 5
    assert sorted(called) == sorted(left_out)
