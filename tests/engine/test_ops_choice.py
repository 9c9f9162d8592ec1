"""Which ops an engine gets, and that it says so when they are the slow ones."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compiled_ops import COMPILED_OPS
from cpp_variants import best_ops

from engine.ops import TorchOps, choose_ops
from engine.ops.cpu import CpuOps

CPU = torch.device("cpu")
GPU = torch.device("cuda")


def test_cpu_with_a_compiler_gets_the_compiled_ops() -> None:
    best_ops(torch.float32)  # skips where there can be none, and fills the cache
    ops = choose_ops(CPU, torch.float32, head_dim=64, num_threads=1, cache_dir=COMPILED_OPS)
    assert isinstance(ops, CpuOps)


def test_machine_without_a_compiler_gets_torch_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        ops = choose_ops(CPU, torch.float32, head_dim=64, num_threads=1, cache_dir=tmp_path)
    assert isinstance(ops, TorchOps)
    assert len(caplog.messages) == 1
    assert "\n" not in caplog.messages[0]


def test_gpu_without_triton_gets_torch_and_a_line_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "engine.ops.triton", None)
    with caplog.at_level(logging.WARNING):
        ops = choose_ops(GPU, torch.bfloat16, head_dim=64, num_threads=1, cache_dir=tmp_path)
    assert isinstance(ops, TorchOps)
    assert len(caplog.messages) == 1
    assert "pip install 'splitserve[triton]'" in caplog.messages[0]


def test_triton_is_imported_for_gpus_only() -> None:
    script = "import sys, engine.ops, engine.runner, engine.ops.choose; print('triton' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_other_devices_get_torch(tmp_path: Path) -> None:
    device = torch.device("meta")
    ops = choose_ops(device, torch.bfloat16, head_dim=64, num_threads=1, cache_dir=tmp_path)
    assert isinstance(ops, TorchOps)
