"""From the name of a library to ops that attend with it, or to one line that says why not."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from typing import Any

import torch

from engine.ops.gpu_attention.flash_attention_4 import FlashAttention4
from engine.ops.gpu_attention.flash_infer import FlashInfer
from engine.ops.gpu_attention.ops import LibraryOps
from engine.ops.gpu_attention.port import AttentionLibrary
from engine.ops.triton.tuning import Tuning, current_gpu
from protocol.errors import StartupError

DTYPES = (torch.float16, torch.bfloat16)


def ops_with_library(
    attention: str, device: torch.device, dtype: torch.dtype, *, head_dim: int
) -> LibraryOps:
    """For the GPU that is current. `attention` is flashinfer or flash_attn_4.

    Raises `StartupError` where the package is missing, or cannot compute what is asked for.
    """
    tuning = Tuning.for_device(dtype, head_dim)
    if dtype not in DTYPES:
        raise _refusal(attention, f"computes in float16 and bfloat16, not in {dtype}")
    library = _flash_attn_4(head_dim) if attention == "flash_attn_4" else _flashinfer(device, head_dim)
    return LibraryOps(tuning, library)


def _flashinfer(device: torch.device, head_dim: int) -> AttentionLibrary:
    _require_gpu("flashinfer", FlashInfer.GENERATIONS)
    if head_dim not in FlashInfer.HEAD_DIMS:
        raise _refusal("flashinfer", f"takes heads of 64, 128 or 256 numbers, not of {head_dim}")
    return FlashInfer(_import("flashinfer", "flashinfer", "flashinfer"), device)


def _flash_attn_4(head_dim: int) -> AttentionLibrary:
    _require_gpu("flash_attn_4", FlashAttention4.GENERATIONS)
    if head_dim not in FlashAttention4.HEAD_DIMS:
        raise _refusal(
            "flash_attn_4", f"takes heads of 256 or of 8, 16, ... 128 numbers, not of {head_dim}"
        )
    module = _import("flash_attn.cute.interface", "flash_attn_4", "flash-attn-4")
    return FlashAttention4(module.flash_attn_varlen_func)


def _require_gpu(attention: str, generations: Collection[int]) -> None:
    target, _ = current_gpu()
    if target.backend != "cuda" or target.arch // 10 not in generations:
        wanted = ", ".join(f"{generation}.x" for generation in sorted(generations))
        raise _refusal(
            attention,
            f"reads KV blocks on NVIDIA GPUs of compute capability {wanted}, not on {target.arch}",
        )


def _import(module: str, attention: str, extra: str) -> Any:
    """Whatever goes wrong in there: a library that fails on import is as good as none."""
    try:
        return import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        raise StartupError(
            f"attention is {attention}, but its package cannot be imported ({error}):"
            f" pip install 'splitserve[{extra}]', or set attention: triton"
        ) from error


def _refusal(attention: str, reason: str) -> StartupError:
    return StartupError(f"attention is {attention}, which {reason}: set attention: triton")
