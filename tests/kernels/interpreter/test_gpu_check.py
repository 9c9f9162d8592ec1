"""`scripts/gpu_check` needs a GPU; what it is made of runs here, on sizes that an interpreter can take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from traced_work import run_again

from engine.ops import Ops
from engine.ops.triton import TritonOps, Tuning
from engine.ops.triton.tuning import Tile

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
TINY: dict[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}


@pytest.fixture
def ops() -> Ops:
    tile = Tile(128, 4, 1, queries=64)
    return TritonOps(Tuning(tile, tile, num_multiprocessors=1))


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_kernels_that_are_right_are_found_to_be(ops: Ops) -> None:
    import gpu_numerics

    parts = [(70, 1), (1, 1), (20, 20)]
    findings = list(gpu_numerics.kernel_findings(ops, CPU, torch.float32, heads=(2, 2, 16), parts=parts))
    assert [finding for finding in findings if not finding.is_good] == []
    assert len(findings) >= 12


def test_a_wrong_kernel_is_found(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_numerics

    monkeypatch.setattr(ops, "rms_norm", lambda x, weight, eps: x * weight)
    findings = list(
        gpu_numerics.kernel_findings(ops, CPU, torch.float32, heads=(2, 2, 16), parts=[(40, 1), (3, 3)])
    )
    assert [finding.name.split(":")[0] for finding in findings if not finding.is_good] == ["norm"]


def test_models_are_compared_eager_and_captured(ops: Ops) -> None:
    import gpu_models
    import gpu_numerics

    description = gpu_models.LLAMA_8B | TINY
    findings = gpu_numerics.model_findings(
        "tiny",
        description,
        ops,
        device=CPU,
        dtype=torch.float32,
        capture=run_again,
        prompt=9,
        num_tokens=3,
    )
    assert [finding.error for finding in findings] == [0.0, 0.0]


def test_whole_steps_are_timed(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_models
    import gpu_speed

    def once(work, device, repeats=20) -> float:
        work()
        return 1.0

    monkeypatch.setattr(gpu_speed, "seconds", once)
    model = gpu_models.make_model(gpu_models.LLAMA_8B | TINY, ops, CPU, torch.float32)
    steps = list(
        gpu_speed.model_figures(
            model, run_again, gpu_speed.Limits(1e9, 1e9), batches=(2,), context=20, prompt=9
        )
    )
    assert steps[1]["decode_2x20_tokens"] == (2.0, "tokens/s")
    assert all(value > 0 for step in steps for value, _ in step.values())


HIDING = """
import sys

HIDDEN = {"ray", "nixl", "gguf", "grpc", "fastapi", "pydantic", "httpx", "tokenizers", "safetensors"}


class Hiding:
    def find_spec(self, name, path=None, target=None):
        if name in HIDDEN:
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, Hiding())
"""
PARTS = "import gpu_models, gpu_numerics, gpu_speed, figures, engine.graph_runner, engine.ops.triton"


def test_neither_a_gpu_nor_what_serves_is_needed_to_say_so(tmp_path: Path) -> None:
    """What the check imports, once there is a GPU, needs torch, triton and numpy alone."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    script = ROOT / "scripts" / "gpu_check"
    hidden = f"{HIDING}\nimport runpy\ntry:\n    runpy.run_path({str(script)!r}, run_name='__main__')"
    run = f"{hidden}\nfinally:\n    {PARTS}\n"
    shown = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=False)
    assert shown.returncode == 2, shown.stderr
    assert shown.stderr == "gpu_check: torch sees no GPU here; nothing was checked\n"
