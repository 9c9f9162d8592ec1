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
    device: torch.device, dtype: torch.dtype, *, head_dim: int, num_threads: int, cache_dir: Path
) -> Ops:
    """The C++ ops on a CPU and Triton's on a GPU, else torch's, with one line in the log that says why.

    What is compiled goes to `cache_dir`; the first call on a machine takes seconds.
    """
    try:
        if device.type == "cuda":
            return _triton_ops(dtype, head_dim)
        if device.type == "cpu":
            return CpuOps.create(cache_dir, dtype=dtype, head_dim=head_dim, num_threads=num_threads)
    except StartupError as error:
        log.warning("computing with torch, which is several times slower here: %s", error.message)
    return TorchOps(device, dtype)


def _triton_ops(dtype: torch.dtype, head_dim: int) -> Ops:
    try:
        from engine.ops.triton import TritonOps
    except ImportError as error:
        raise StartupError(
            f"the ops for GPUs need Triton ({error}): pip install 'splitserve[triton]'"
        ) from error
    return TritonOps.create(dtype=dtype, head_dim=head_dim)
