"""Engines as they are composed on CPUs that lack something: a compiler, or the wider instruction sets.

What this machine has is hidden from the loader, one after another. The code for AVX-512 runs emulated
(see `cpp_variants`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled_ops import cache_folder
from cpp_variants import EMULATED, VARIANTS, best_ops, variant_ops
from tiny_clusters import tiny_config, tiny_model
from tiny_models import VOCAB_SIZE

from cluster.compose import open_model
from cluster.engine_parts import EngineParts, build_engine
from cluster.verification import greedy_cases
from cluster.verification.colocated import answer_colocated
from cluster.verification.compare import compare
from cluster.verification.reference import TransformersReference
from engine.machine import read_cpu_flags

TEXT = [3 + (i * i + 5 * i) % (VOCAB_SIZE - 3) for i in range(997)]
EXPECTED = {
    "no_compiler": None,
    "no_avx2": None,
    "no_fma": None,
    "no_avx512": "avx2",
    "avx512_emulated": EMULATED[0].name,
    "avx512_bf16_emulated": EMULATED[1].name,
}
"""The instruction set that is left to the loader; None: torch computes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(params=EXPECTED)
def instruction_set(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> str | None:
    """Hides what the parameter says from everything that is loaded afterwards."""
    flags, name = read_cpu_flags(), EXPECTED[request.param]
    if request.param == "no_compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
    elif name in (None, "avx2"):
        hidden = request.param.removeprefix("no_")
        left = {flag for flag in flags if not flag.startswith(hidden)}
        monkeypatch.setattr("engine.ops.cpu.ops.read_cpu_flags", lambda: frozenset(left))
    else:
        monkeypatch.setattr("engine.ops.cpu.ops.usable", lambda flags: [VARIANTS[name]])
    return name


def build(model: Path, dtype: str, cache_dir: Path, instruction_set: str | None) -> EngineParts:
    """An engine whose kernels are compiled, unless there shall be none."""
    import torch

    if instruction_set is not None:
        make = best_ops if instruction_set not in VARIANTS else lambda d: variant_ops(instruction_set, d)
        make(getattr(torch, dtype))  # skips where there can be none
    config = tiny_config(model, dtype=dtype, cache_dir=str(cache_dir))
    return build_engine(config, config.prefill, open_model(config))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_engine_is_right_whatever_the_cpu_lacks(
    model: Path,
    tmp_path: Path,
    instruction_set: str | None,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Random weights round worse than trained ones.
    monkeypatch.setattr("cluster.verification.reference.BF16_ROUNDINGS", 8.0)
    engine = build(model, dtype, cache_folder(tmp_path), instruction_set)
    name = engine.ops_name
    assert name == f"C++ {instruction_set}" if instruction_set else name.startswith("torch")
    cases = greedy_cases(TEXT, num_cases=6, max_tokens=8, limit=engine.scheduler.max_model_len)
    reference = TransformersReference(model, sorted(engine.eos_token_ids))
    found = compare(
        "greedy",
        cases,
        answer_colocated(engine.make_core(), cases),
        await reference.answer(cases),
        None if dtype == "float32" else reference.is_bf16_tie,
    )
    assert found.is_equal, found.mismatches
    assert found.num_ties <= len(cases) // 2
