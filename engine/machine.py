"""What does this machine offer to an engine on its CPU? Found without torch."""

from __future__ import annotations

import shutil
from pathlib import Path

COMPILERS = ("g++", "clang++", "c++")
CPUINFO = Path("/proc/cpuinfo")


def find_compiler() -> Path | None:
    """The first C++ compiler on the PATH."""
    found = (shutil.which(name) for name in COMPILERS)
    return next((Path(path) for path in found if path), None)


def read_cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The flags of this CPU; empty where the system does not list them (not Linux, not x86)."""
    if not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()
