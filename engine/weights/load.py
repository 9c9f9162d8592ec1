"""Weights from a model folder into memory, without a copy where the stored type is the wanted one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

from engine.weights.checkpoint import StoredTensor, read_checkpoint
from engine.weights.experts import one_by_one
from engine.weights.folder import ModelFolder
from engine.weights.part import byte_range, part_bytes, read_tensor
from engine.weights.progress import Progress, tracked
from protocol.errors import StartupError

if TYPE_CHECKING:
    import torch

    from engine.parallel import Shard

_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_DERIVED = "rotary_emb.inv_freq"
"""A buffer that old checkpoints carry and that models compute from the config."""


def load_weights(
    folder: ModelFolder,
    dtype: torch.dtype,
    *,
    shard: Shard | None = None,
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """The model's tensors on the CPU, by Hugging Face name; with `shard` that rank's part of them, where
    layers count from the rank's first.

    Experts are named as by `one_by_one`. A tensor that is stored as `dtype` is a read-only view of the
    mapped file: workers on one machine share its pages, and it must not be written to. The others are cast,
    one after the other: threads that map and cast side by side get into each other's way in the kernel, and
    took up to five times as long. What can be done in parallel is the disk's part, which is asked for all
    files at once.
    The output projection of a model with tied embeddings is left out. Raises `StartupError` that names
    the file and what to do.
    """
    found = one_by_one(read_checkpoint(folder.path))
    stored = [tensor for tensor in found if _is_needed(tensor, folder, shard)]
    _check_types(stored)
    stored.sort(key=lambda tensor: (tensor.file, tensor.offset))  # reads each file from front to back
    for _, in_file in groupby(stored, key=lambda tensor: tensor.file):
        _read_ahead(list(in_file), shard)
    weights: dict[str, torch.Tensor] = {}
    total_bytes = sum(part_bytes(tensor, shard) for tensor in stored)
    with tracked(progress, f"Loading {folder.name}", total_bytes) as advance:
        for _, in_file in groupby(stored, key=lambda tensor: tensor.file):
            for tensor, value in _read(list(in_file), dtype, shard):
                weights[(shard.local_name(tensor.name) if shard else None) or tensor.name] = value
                advance(part_bytes(tensor, shard))
    return weights


def _read_ahead(tensors: list[StoredTensor], shard: Shard | None) -> None:
    """Have the kernel read a file from now on, or what a shard needs of it; what another worker has had
    read already is not read twice.
    """
    ranges = [(0, 0)] if shard is None else [byte_range(tensor, shard) for tensor in tensors]
    with tensors[0].file.open("rb") as stream:
        for offset, num_bytes in ranges:
            os.posix_fadvise(stream.fileno(), offset, num_bytes, os.POSIX_FADV_WILLNEED)


def _read(
    tensors: list[StoredTensor], dtype: torch.dtype, shard: Shard | None
) -> Iterable[tuple[StoredTensor, torch.Tensor]]:
    """The tensors of one file."""
    from safetensors import SafetensorError, safe_open

    file = tensors[0].file
    try:
        with safe_open(file, framework="pt") as opened:
            for tensor in tensors:
                yield tensor, read_tensor(opened, tensor, shard).to(dtype)
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{file} cannot be read ({error}): download it again") from error


def _is_needed(tensor: StoredTensor, folder: ModelFolder, shard: Shard | None) -> bool:
    is_elsewhere = shard and (not shard.holds(tensor.name) or shard.local_name(tensor.name) is None)
    if tensor.name.endswith(_DERIVED) or is_elsewhere:
        return False
    return not (tensor.name == "lm_head.weight" and folder.config.get("tie_word_embeddings", False))


def _check_types(tensors: Iterable[StoredTensor]) -> None:
    for tensor in tensors:
        if tensor.dtype not in _FLOAT_TYPES:
            raise StartupError(
                f"{tensor.file} stores {tensor.name!r} as {tensor.dtype}, which is not supported: "
                f"use a model stored as one of {', '.join(_FLOAT_TYPES)}, or a GGUF"
            )
