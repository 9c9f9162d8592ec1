"""Weights from a model folder into memory, without a copy where the stored type is the wanted one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from engine.weights.checkpoint import StoredTensor, read_checkpoint
from engine.weights.folder import ModelFolder
from engine.weights.progress import Progress, tracked
from protocol.errors import StartupError

if TYPE_CHECKING:
    import torch

_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_DERIVED = "rotary_emb.inv_freq"
"""A buffer that old checkpoints carry and that models compute from the config."""


def load_weights(
    folder: ModelFolder,
    dtype: torch.dtype,
    *,
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """The model's tensors on the CPU, by Hugging Face name.

    A tensor that is stored as `dtype` is a read-only view of the mapped file: workers on one machine
    share its pages, and it must not be written to. The others are cast, one after the other: threads that
    map and cast side by side get into each other's way in the kernel, and took up to five times as long.
    What can be done in parallel is the disk's part, which is asked for all files at once.
    The output projection of a model with tied embeddings is left out. Raises `StartupError` that names
    the file and what to do.
    """
    stored = [tensor for tensor in read_checkpoint(folder.path) if _is_needed(tensor, folder)]
    _check_types(stored)
    stored.sort(key=lambda tensor: (tensor.file, tensor.offset))  # reads each file from front to back
    for file in dict.fromkeys(tensor.file for tensor in stored):
        _read_ahead(file)
    weights: dict[str, torch.Tensor] = {}
    total_bytes = sum(tensor.num_bytes for tensor in stored)
    with tracked(progress, f"Loading {folder.name}", total_bytes) as advance:
        for _, shard in groupby(stored, key=lambda tensor: tensor.file):
            for tensor, value in _read(list(shard), dtype):
                weights[tensor.name] = value
                advance(tensor.num_bytes)
    return weights


def _read_ahead(file: Path) -> None:
    """Have the kernel read it from now on; what another worker has had read already is not read twice."""
    with file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _read(tensors: list[StoredTensor], dtype: torch.dtype) -> Iterable[tuple[StoredTensor, torch.Tensor]]:
    """The tensors of one file."""
    from safetensors import SafetensorError, safe_open

    file = tensors[0].file
    try:
        with safe_open(file, framework="pt") as opened:
            for tensor in tensors:
                yield tensor, opened.get_tensor(tensor.name).to(dtype)
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{file} cannot be read ({error}): download it again") from error


def _is_needed(tensor: StoredTensor, folder: ModelFolder) -> bool:
    if tensor.name.endswith(_DERIVED):
        return False
    return not (tensor.name == "lm_head.weight" and folder.config.get("tie_word_embeddings", False))


def _check_types(tensors: Iterable[StoredTensor]) -> None:
    for tensor in tensors:
        if tensor.dtype not in _FLOAT_TYPES:
            raise StartupError(
                f"{tensor.file} stores {tensor.name!r} as {tensor.dtype}, which is not supported: "
                f"use a model stored as one of {', '.join(_FLOAT_TYPES)}, or a GGUF"
            )
