"""How large are the tiles, and how many warps compute them? One table per kind of GPU.

Found by compiling for every target without a device and reading what came out: no spilled registers,
shared memory that fits, two decode blocks per multiprocessor (`tests/kernels/ahead_of_time`). Which of
the fitting ones is fastest takes a device to say, and none has said it yet. Chunks in float32 have few
queries to a tile: anything larger spills on one GPU or another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.ops.triton.cache_layout import padded
from protocol.errors import StartupError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
MAX_SPLITS = 64
"""Parts of one sequence that decode side by side; for a batch of one on a large GPU."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program works on at a time."""

    keys: int
    num_warps: int
    num_stages: int
    queries: int = 1
    precision: str = "tf32"
    """Of products of float32, as Triton names it: those who ask for float32 want all of it, where tensor
    cores would drop 13 bits ("tf32"), add them up in three products ("tf32x3"), or not be used ("ieee").
    """


@dataclass(frozen=True, slots=True)
class Tuning:
    """All that depends on the device and is no matter of right or wrong."""

    decode: Tile
    prefill: Tile
    num_multiprocessors: int
    groups_experts: bool = False
    """Whether torch multiplies many experts' rows at once without asking the host how many they are."""

    @classmethod
    def for_device(cls, dtype: torch.dtype, head_dim: int) -> Tuning:
        """For the GPU that is current. Raises `StartupError` for what the kernels cannot compute."""
        if dtype not in DTYPES:
            raise StartupError(f"the Triton ops compute in float32, float16 and bfloat16, not in {dtype}")
        if head_dim > MAX_HEAD_DIM or head_dim % 2:
            raise StartupError(f"the Triton ops take even head sizes up to {MAX_HEAD_DIM}, not {head_dim}")
        target, properties = current_gpu()
        tiles = _AMD if target.backend == "hip" else _NVIDIA
        decode, prefill = tiles[dtype.itemsize][padded(head_dim, 64)]
        return cls(decode, prefill, properties["multiprocessor_count"], _groups_experts(target, dtype))

    def num_splits(self, num_programs: int) -> int:
        """Parts per sequence for so many pairs of sequence and KV head: enough to fill the GPU.

        Depends on nothing that changes within a captured step.
        """
        wanted = 4 * self.num_multiprocessors // max(num_programs, 1)
        return min(padded(wanted + 1) // 2, MAX_SPLITS) if wanted else 1


def _groups_experts(target: Any, dtype: torch.dtype) -> bool:
    """Of torch 2.13: bfloat16 on compute capability 9 and 10. For others it waits for the device."""
    return target.backend == "cuda" and target.arch // 10 in {9, 10} and dtype is torch.bfloat16


def current_gpu() -> tuple[Any, dict[str, int]]:
    """(Triton's target, properties). Raises `StartupError` where there is none."""
    from triton.runtime.driver import driver

    try:
        gpu = driver.active
        return gpu.get_current_target(), gpu.utils.get_device_properties(gpu.get_current_device())
    except RuntimeError as error:
        raise StartupError(f"Triton finds no GPU that it supports: {error}") from error


# By bytes per number, then by head dimension: decode, prefill.
_NVIDIA = {
    2: {
        64: (Tile(64, 4, 3), Tile(64, 8, 3, queries=128)),
        128: (Tile(64, 4, 3), Tile(64, 8, 2, queries=128)),
        256: (Tile(32, 4, 2), Tile(32, 8, 2, queries=128)),
    },
    4: {
        64: (Tile(32, 4, 2, 1, "tf32x3"), Tile(32, 4, 2, 16, "tf32x3")),
        128: (Tile(32, 4, 2, 1, "tf32x3"), Tile(32, 4, 2, 16, "tf32x3")),
        256: (Tile(16, 4, 2, 1, "tf32x3"), Tile(16, 4, 2, 16, "tf32x3")),
    },
}
_AMD = {
    2: {
        64: (Tile(64, 4, 2), Tile(64, 4, 2, queries=128)),
        128: (Tile(64, 4, 2), Tile(32, 4, 2, queries=128)),
        256: (Tile(32, 4, 2), Tile(32, 8, 1, queries=64)),
    },
    4: {
        64: (Tile(32, 4, 2, 1, "ieee"), Tile(32, 4, 2, 32, "ieee")),
        128: (Tile(16, 4, 1, 1, "ieee"), Tile(32, 4, 1, 32, "ieee")),
        256: (Tile(16, 4, 1, 1, "ieee"), Tile(16, 4, 1, 32, "ieee")),
    },
}
