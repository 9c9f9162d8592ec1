"""A Triton driver for a GPU that is not there: kernels are specialised and compiled as for it, never run.

    with fake_gpu("sm_90") as gpu:
        launch_something(tensors_on_the_cpu)
    gpu.launches          # what would have run: kernels and their grids
    gpu.binaries(kernel)  # what it was compiled to

Launching raises `OutOfResources` as the device would.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler
from triton.runtime.driver import driver


@dataclass(frozen=True, slots=True)
class Model:
    """What a kind of GPU has, by its vendor's documents."""

    target: GPUTarget
    max_shared_bytes: int  # per block
    shared_bytes: int  # per multiprocessor
    num_registers: int  # of four bytes, per multiprocessor
    num_multiprocessors: int


MODELS = {
    "sm_80": Model(GPUTarget("cuda", 80, 32), 166912, 167936, 65536, 108),
    "sm_90": Model(GPUTarget("cuda", 90, 32), 232448, 233472, 65536, 132),
    "sm_100": Model(GPUTarget("cuda", 100, 32), 232448, 233472, 65536, 148),
    "gfx942": Model(GPUTarget("hip", "gfx942", 64), 65536, 65536, 4 * 64 * 512, 304),
}


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: str
    grid: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a compiled kernel takes, read off the binary."""

    registers: int  # per thread
    spilled_bytes: int  # per thread, of local memory
    shared_bytes: int
    num_threads: int
    opcodes: Counter[str]
    """Of PTX or AMD's assembly: matrix instructions are there what they will be on the device."""

    def blocks_per_multiprocessor(self, model: Model) -> int:
        by_registers = model.num_registers // (max(self.registers, 24) * self.num_threads)
        reserved = 1024 if model.target.backend == "cuda" else 0
        return min(by_registers, model.shared_bytes // (self.shared_bytes + reserved or 1))


class FakeDriver:
    """As much of Triton's driver as compiling and launching asks for."""

    _num_made = 0

    def __init__(self, model: Model) -> None:
        FakeDriver._num_made += 1
        self.model = model
        self.launches: list[Launch] = []
        self.utils = _Utils(model)
        self._device = 1000 + FakeDriver._num_made  # binaries are kept per device: none are shared
        launches = self.launches

        class Launcher:
            def __init__(self, source: Any, metadata: Any) -> None:
                self._name = metadata.name

            def __call__(self, x: int, y: int, z: int, *_: Any) -> None:
                launches.append(Launch(self._name, (x, y, z)))

        self.launcher_cls = Launcher

    def binaries(self, kernel: Any) -> list[Any]:
        """What a `triton.jit` function was compiled to so far, one for each specialisation."""
        return list(kernel.device_caches[self._device][0].values())

    def get_current_target(self) -> GPUTarget:
        return self.model.target

    def get_current_device(self) -> int:
        return self._device

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def is_active(self) -> bool:
        return True


class _Utils:
    def __init__(self, model: Model) -> None:
        self._model = model

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._model.max_shared_bytes,
            "multiprocessor_count": self._model.num_multiprocessors,
            "warpSize": self._model.target.warp_size,
            "max_num_regs": 65536,
        }

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024

    def unload_module(self, module: int) -> None:
        pass


@contextmanager
def fake_gpu(name: str, **changes: int) -> Iterator[FakeDriver]:
    """`changes` to what its `Model` says."""
    fake, before = FakeDriver(replace(MODELS[name], **changes)), driver._active
    driver.set_active(fake)
    compiler.max_shared_mem.cache_clear()
    try:
        yield fake
    finally:
        driver._active = before
        compiler.max_shared_mem.cache_clear()


@cache
def usage(binary: Any) -> Usage:
    return _nvidia_usage(binary) if binary.metadata.target.backend == "cuda" else _amd_usage(binary)


def _nvidia_usage(binary: Any) -> Usage:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(binary.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
        resources = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", resources)
    assert found, resources
    registers, stack, local = map(int, found.groups())
    opcodes = re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][a-z0-9_.]*)", binary.asm["ptx"], re.MULTILINE)
    threads = binary.metadata.num_warps * 32
    return Usage(registers, stack + local, binary.metadata.shared, threads, Counter(opcodes))


def _amd_usage(binary: Any) -> Usage:
    assembly = binary.asm["amdgcn"]

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s*(\d+)", assembly)
        return int(found.group(1)) if found else 0

    opcodes = re.findall(r"^\s+([a-z]+_[a-z0-9_]+)", assembly, re.MULTILINE)
    threads = binary.metadata.num_warps * 64
    spilled = number("private_segment_fixed_size")
    return Usage(number("vgpr_count"), spilled, binary.metadata.shared, threads, Counter(opcodes))
