"""Where tests keep the compiled C++ ops: the compiler takes ten seconds, so one run of it serves all."""

from __future__ import annotations

from pathlib import Path

COMPILED_OPS = Path(__file__).parents[2] / ".pytest_cache" / "cpu-ops"


def cache_folder(parent: Path) -> Path:
    """A cluster's `cache_dir` in `parent`: empty, but for what was compiled before."""
    folder = parent / "cache"
    folder.mkdir(parents=True, exist_ok=True)
    COMPILED_OPS.mkdir(parents=True, exist_ok=True)
    ops = folder / "cpu-ops"
    if not ops.is_symlink():
        ops.symlink_to(COMPILED_OPS)
    return folder
