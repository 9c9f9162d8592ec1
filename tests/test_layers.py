"""Imports point down the layers, and heavy libraries are imported where the architecture says."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LAYERS = {
    "protocol": 0,
    "rpc": 1,
    "engine": 1,
    "kv_transfer": 1,
    "prefill_worker": 2,
    "decode_worker": 2,
    "router": 2,
    "cluster": 3,
}

ALLOWED_IN = {
    "ray": ("cluster/",),
    "nixl": ("kv_transfer/nixl.py",),
    "triton": ("engine/ops/",),
    "torch": ("engine/", "cluster/", "kv_transfer/pairs/"),
    "transformers": ("engine/weights/", "cluster/"),
    "grpc": ("rpc/", "prefill_worker/", "decode_worker/", "router/", "protocol/wire/"),
    "fastapi": ("router/", "cluster/"),
}
LAZY = {"nixl", "triton", "transformers", "gguf"}
TORCH_FREE = (
    "engine/block_pool.py",
    "engine/scheduler.py",
    "engine/core.py",
    "engine/thread.py",
    "engine/sequence.py",
    "engine/plan.py",
    "engine/messages.py",
    "engine/policy.py",
)
"""The pure core: the same code must run in a simulator."""


def product_files() -> list[Path]:
    return sorted(p for package in LAYERS for p in (ROOT / package).rglob("*.py"))


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, is at the top of the file) of every absolute import."""
    found = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append((node.module, id(node) in top))
    return found


@pytest.mark.parametrize("path", product_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_only_from_layers_below(path: Path) -> None:
    here = path.relative_to(ROOT).parts[0]
    for module, _ in imports(path):
        package = module.split(".")[0]
        if package in LAYERS and package != here:
            assert LAYERS[package] < LAYERS[here], f"{here} must not import {module}"


@pytest.mark.parametrize("path", product_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_heavy_libraries_are_imported_only_where_they_belong(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    for module, at_top in imports(path):
        library = module.split(".")[0]
        if library in ALLOWED_IN:
            assert name.startswith(ALLOWED_IN[library]), f"{name} must not import {library}"
        if library in LAZY and not name.startswith("engine/ops/triton"):
            assert not at_top, f"{name} must import {library} inside the function that needs it"
        if library == "torch" and name in TORCH_FREE:
            raise AssertionError(f"{name} must run without torch")


@pytest.mark.parametrize("path", product_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_cuda_and_the_environment_are_touched_in_one_place(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8")
    if name not in {"engine/device.py", "engine/graph_runner.py"}:
        assert "torch.cuda" not in text
    if name != "cluster/environment.py":
        assert "os.environ" not in text
        assert "os.getenv" not in text


def test_the_readme_tree_is_up_to_date() -> None:
    """The tree in the README is how a newcomer finds a file; it must not rot."""
    check = subprocess.run(
        [sys.executable, ROOT / "scripts" / "readme_tree", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stderr
