"""How does a compiled library come about? One compiler run, kept in a cache.

A library holds one instruction set and is named by it, by the sources and by the compiler: a cache
shared by different CPUs, versions or processes never gives one what another built for itself.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from engine.ops.cpu.instruction_sets import InstructionSet
from protocol.errors import StartupError

log = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent
PREFIX = "cpu-ops-"
LOCK = ".lock"
BUILD_TIMEOUT_S = 300.0
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wno-psabi"),
    # Multiply-adds only where the source says so: every variant of a kernel rounds alike.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)


def build(candidates: Sequence[InstructionSet], cache_dir: Path, compiler: Path) -> Path:
    """The library for the first candidate that the compiler knows. Raises `StartupError` for none."""
    for candidate in candidates[:-1]:
        try:
            return build_for(candidate, cache_dir, compiler)
        except StartupError as error:
            log.info("trying the next instruction set: %s", error)
    return build_for(candidates[-1], cache_dir, compiler)


def instruction_set_of(library: Path) -> str:
    """The name of the one that a library of `build` was compiled for."""
    return library.stem.removeprefix(PREFIX).rpartition("-")[0]


def build_for(
    instruction_set: InstructionSet, cache_dir: Path, compiler: Path, extra_flags: Sequence[str] = ()
) -> Path:
    """The library for `instruction_set`, compiled unless the cache has it. Raises `StartupError`.

    Where several need it at once, as ranks of a worker do, one compiles and the others wait. A file with
    its final name is whole.
    """
    from engine.weights.cache_files import locked

    flags = (*FLAGS, *instruction_set.compiler_flags, *extra_flags)
    library = cache_dir / f"{PREFIX}{instruction_set.name}-{_fingerprint(compiler, flags)}.so"
    if library.exists():
        return library
    cache_dir.mkdir(parents=True, exist_ok=True)
    with locked(cache_dir / LOCK):
        if not library.exists():
            _compile(library, compiler, flags)
    return library


def _compile(library: Path, compiler: Path, flags: Sequence[str]) -> None:
    handle, unfinished = tempfile.mkstemp(suffix=".so.tmp", dir=library.parent)
    os.close(handle)
    try:
        _run(compiler, *flags, str(SOURCE_DIR / "kernels.cpp"), "-o", unfinished)
        Path(unfinished).rename(library)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _fingerprint(compiler: Path, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(_run(compiler, "--version").encode())
    digest.update("\0".join(flags).encode())
    for source in sorted([*SOURCE_DIR.glob("*.h"), *SOURCE_DIR.glob("*.cpp")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _run(compiler: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [str(compiler), *arguments], capture_output=True, text=True, check=True, timeout=BUILD_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip() or str(error).rpartition("' ")[2]  # killed, it says nothing
        first = next((line for line in said.splitlines() if "error" in line), said)
        raise StartupError(f"{compiler.name} cannot compile the CPU ops: {first}") from error
    except subprocess.TimeoutExpired as error:
        raise StartupError(f"{compiler.name} took more than {BUILD_TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise StartupError(f"the C++ compiler does not run: {error}") from error
    return done.stdout
