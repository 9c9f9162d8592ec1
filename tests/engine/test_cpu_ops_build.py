"""Which library is built for which CPU, and what happens where none can be."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine.machine import find_compiler, read_cpu_flags
from engine.ops.cpu import CpuOps
from engine.ops.cpu.build import LOCK, build, build_for
from engine.ops.cpu.instruction_sets import INSTRUCTION_SETS, InstructionSet, usable
from protocol.errors import StartupError

ALL_FLAGS = frozenset().union(*(s.cpu_flags for s in INSTRUCTION_SETS))
QUICK = InstructionSet("quick", frozenset(), ("-fsyntax-only",))


def create(cache_dir: Path, **changes: object) -> CpuOps:
    arguments = {"dtype": torch.float32, "head_dim": 64, "num_threads": 1, **changes}
    return CpuOps.create(cache_dir, **arguments)  # type: ignore[arg-type]


def fake_compiler(folder: Path, body: str) -> Path:
    """A compiler that knows `--version` and else runs `body`, a shell script; $out is the output file."""
    script = folder / "fake-c++"
    script.write_text(
        f"#!/bin/sh\n[ $1 = --version ] && echo fake 1 && exit\nfor out; do :; done\n{body}\n", "utf-8"
    )
    script.chmod(0o755)
    return script


def test_each_masked_instruction_set_leaves_the_next_best() -> None:
    names = [s.name for s in usable(ALL_FLAGS)]
    assert names == ["avx512bf16", "avx512", "avx2"]
    assert [s.name for s in usable(ALL_FLAGS - {"avx512_bf16"})] == names[1:]
    assert [s.name for s in usable(ALL_FLAGS - {"avx512vl"})] == names[2:]
    assert not usable(ALL_FLAGS - {"fma"})
    assert not usable(())


def test_cpu_flags_are_read_from_the_first_processor(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\n\nflags\t\t: fpu\n", "utf-8")
    assert read_cpu_flags(cpuinfo) == {"fpu", "avx2", "fma"}
    cpuinfo.write_text("processor : 0\n", "utf-8")
    assert read_cpu_flags(cpuinfo) == frozenset()
    assert read_cpu_flags(tmp_path / "absent") == frozenset()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cpu_flags": frozenset({"fpu", "avx"})}, "AVX2"),
        ({"dtype": torch.float16}, "float16"),
        ({"head_dim": 24}, "multiples of 16"),
        ({"head_dim": 272}, "256"),
    ],
)
def test_unsuitable_cpus_and_models_are_refused_in_one_line(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(StartupError, match=reason) as refused:
        create(tmp_path, **changes)
    assert "\n" not in refused.value.message


def test_absent_compiler_is_named_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartupError, match=r"install g\+\+ or clang\+\+"):
        create(tmp_path, cpu_flags=ALL_FLAGS)


def test_broken_compiler_is_one_line_and_leaves_nothing_but_the_lock(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, "echo kernels.cpp:1: error: no such header >&2; exit 1")
    with pytest.raises(StartupError, match="no such header") as refused:
        build_for(QUICK, tmp_path / "cache", compiler)
    assert "\n" not in refused.value.message
    assert [file.name for file in (tmp_path / "cache").iterdir()] == [LOCK]


def test_compiler_without_an_instruction_set_builds_the_next(tmp_path: Path) -> None:
    compiler = fake_compiler(
        tmp_path, "case $* in *bf16*) echo error: unknown flag >&2; exit 1;; esac; echo built > $out"
    )
    library = build(usable(ALL_FLAGS), tmp_path / "cache", compiler)
    assert library.name.startswith("cpu-ops-avx512-")


def test_library_is_built_once_and_again_for_another_compiler_or_set(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, "echo run >> $0.log; echo built > $out")
    log, cache = Path(f"{compiler}.log"), tmp_path / "cache"
    first = build_for(QUICK, cache, compiler)
    assert build_for(QUICK, cache, compiler) == first
    assert log.read_text("utf-8").count("run") == 1
    assert build_for(InstructionSet("other", frozenset(), ()), cache, compiler) != first
    compiler.write_text(compiler.read_text("utf-8").replace("fake 1", "fake 2"), "utf-8")
    assert build_for(QUICK, cache, compiler) != first
    assert len(list(cache.glob("*.so"))) == 3


def test_of_builds_at_the_same_time_one_compiles_and_the_others_wait_for_it(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, "echo run >> $0.log; echo half > $out; echo whole >> $out")
    with ThreadPoolExecutor(4) as threads:
        built = list(threads.map(lambda _: build_for(QUICK, tmp_path / "cache", compiler), range(8)))
    assert len(set(built)) == 1
    assert list((tmp_path / "cache").glob("cpu-ops*")) == [built[0]]
    assert Path(f"{compiler}.log").read_text("utf-8") == "run\n"
    assert built[0].read_text("utf-8") == "half\nwhole\n"


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS, ids=lambda s: s.name)
def test_every_instruction_set_compiles_without_a_warning(instruction_set: InstructionSet) -> None:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler here")
    source = Path(build.__code__.co_filename).parent / "kernels.cpp"
    flags = ("-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-psabi")
    subprocess.run([compiler, *flags, *instruction_set.compiler_flags, source], check=True)


def test_threads_end_with_the_ops() -> None:
    """A process that creates and drops ops many times keeps no thread of theirs."""
    code = """
import gc, os, sys, torch
sys.path.insert(0, sys.argv[1])
from cpp_variants import VARIANTS, variant_ops
make = variant_ops.__wrapped__
def threads(): return len(os.listdir("/proc/self/task"))
for _ in range(3):
    ops = make(next(iter(VARIANTS)), torch.float32, 4)
    during = threads()
    ops = None
    gc.collect()
    assert during - threads() == 3
"""
    if find_compiler() is None or not usable(read_cpu_flags()):
        pytest.skip("the C++ ops need a compiler and a CPU with AVX2")
    subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent)], check=True, cwd=Path.cwd())
