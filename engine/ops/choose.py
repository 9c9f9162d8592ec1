"""Which implementation of the ops does an engine compute with?"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from engine.ops.cpu import CpuOps
from engine.ops.port import Ops
from engine.ops.torch_ops import TorchOps
from protocol.errors import StartupError

log = logging.getLogger(__name__)


def choose_ops(
    device: torch.device,
    dtype: torch.dtype,
    *,
    head_dim: int,
    num_threads: int,
    cache_dir: Path,
    attention: str = "triton",
) -> Ops:
    """The C++ ops on a CPU and Triton's on a GPU, else torch's, with one line in the log that says why.

    What is compiled goes to `cache_dir`; the first call on a machine takes seconds. Nothing
    stands in for another `attention` (flashinfer, flash_attn_4): raises `StartupError` where it cannot be.
    """
    if attention != "triton":
        return _library_ops(attention, device, dtype, head_dim)
    try:
        if device.type == "cuda":
            return _triton_ops(dtype, head_dim)
        if device.type == "cpu":
            return CpuOps.create(cache_dir, dtype=dtype, head_dim=head_dim, num_threads=num_threads)
    except StartupError as error:
        log.warning("computing with torch, which is several times slower here: %s", error.message)
    return TorchOps(device, dtype)


def _library_ops(attention: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Ops:
    if device.type != "cuda":
        raise StartupError(
            f"attention is {attention}, which is for GPUs, but this engine computes on {device.type}:"
            " leave attention out, or set num_gpus of both pools to 1"
        )
    try:
        from engine.ops.gpu_attention import ops_with_library
    except ImportError as error:
        raise _needs_triton(error) from error
    return ops_with_library(attention, device, dtype, head_dim=head_dim)


def _triton_ops(dtype: torch.dtype, head_dim: int) -> Ops:
    try:
        from engine.ops.triton import TritonOps
    except ImportError as error:
        raise _needs_triton(error) from error
    return TritonOps.create(dtype=dtype, head_dim=head_dim)


def _needs_triton(error: ImportError) -> StartupError:
    return StartupError(f"the ops for GPUs need Triton ({error}): pip install 'splitserve[triton]'")
