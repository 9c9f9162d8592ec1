"""Which tensors a folder of safetensors holds, where their bytes lie, and whether the files are whole."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import StartupError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_PICKLES = ("*.bin", "*.pt", "*.pth")
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_SAMPLE_BYTES = 4096
_VOLATILE_KEYS = ("_name_or_path", "transformers_version")
"""Entries of config.json that differ between equal models."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file, unread."""

    name: str
    dtype: str
    """In the format's spelling: F32, F16, BF16, ..."""
    shape: tuple[int, ...]
    file: Path
    offset: int
    """Of its first byte, from the start of the file."""
    num_bytes: int
    stored_as: str = ""
    """Its name in the file, where that is another."""
    matrix: tuple[int, int] | None = None
    """(index, first row): it is a part of a stack of matrices, `stored_as`."""


def read_checkpoint(folder: Path) -> tuple[StoredTensor, ...]:
    """All tensors of the folder, by name. Reads headers only.

    Raises `StartupError` for missing, truncated, corrupt or doubled shards.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in _shard_files(folder):
        for tensor in _read_header(file):
            if tensor.name in tensors:
                raise StartupError(
                    f"tensor {tensor.name!r} is in both {tensors[tensor.name].file} and {file}: "
                    "remove the files that do not belong to this model"
                )
            tensors[tensor.name] = tensor
    _check_index(folder, tensors)
    return tuple(tensors[name] for name in sorted(tensors))


def content_digest(config: Mapping[str, Any], tensors: Iterable[StoredTensor]) -> str:
    """Name a model by its content: config, tensor names, dtypes, shapes and samples of every tensor.

    Three pages of each tensor are read instead of all its bytes: enough to tell any two trainings
    apart, and quick for any size. Where the bytes lie, and in how many files, does not matter.
    """
    stable = {key: value for key, value in config.items() if key not in _VOLATILE_KEYS}
    digest = hashlib.sha256(json.dumps(stable, sort_keys=True).encode())
    by_file: dict[Path, list[StoredTensor]] = {}
    for tensor in tensors:
        by_file.setdefault(tensor.file, []).append(tensor)
    samples: dict[str, bytes] = {}
    for file, inside in by_file.items():
        samples.update(_sample(file, inside))
    for name in sorted(samples):
        digest.update(samples[name])
    return digest.hexdigest()[:32]


def _sample(file: Path, tensors: Iterable[StoredTensor]) -> dict[str, bytes]:
    """A digest of a few pages per tensor of one file."""
    samples: dict[str, bytes] = {}
    with file.open("rb") as stream:
        for tensor in tensors:
            digest = hashlib.sha256(f"{tensor.name}|{tensor.dtype}|{tensor.shape}".encode())
            last = max(0, tensor.num_bytes - _SAMPLE_BYTES)
            for start in sorted({0, last // 2, last}):
                size = min(_SAMPLE_BYTES, tensor.num_bytes - start)
                digest.update(os.pread(stream.fileno(), size, tensor.offset + start))
            samples[tensor.name] = digest.digest()
    return samples


def _shard_files(folder: Path) -> tuple[Path, ...]:
    """The files that make up the model: the index's, else the single file, else all numbered shards."""
    if (folder / INDEX_FILE).is_file():
        names = sorted(set(_weight_map(folder).values()))
        return tuple(_existing_shard(folder, name, f"{INDEX_FILE} lists it") for name in names)
    if (folder / SINGLE_FILE).is_file():
        return (folder / SINGLE_FILE,)
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise StartupError(_no_weights(folder))
    numbered = [match for file in found if (match := _SHARD_NAME.fullmatch(file.name))]
    if not numbered:
        return tuple(found)
    stem, count = numbered[0]["stem"], numbered[0]["count"]
    wanted = [f"{stem}-{number:05d}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
    return tuple(_existing_shard(folder, name, f"the model has {int(count)} shards") for name in wanted)


def _existing_shard(folder: Path, name: str, why: str) -> Path:
    if Path(name).name != name:
        raise StartupError(f"{folder / INDEX_FILE} names a file outside its folder: {name!r}")
    if not (folder / name).is_file():
        raise StartupError(f"{folder / name} is missing ({why}): download the model again")
    return folder / name


def _no_weights(folder: Path) -> str:
    if any(file for pattern in _PICKLES for file in folder.glob(pattern)):
        return (
            f"{folder} holds only pickled weights (.bin/.pt), and loading those can run any code in them: "
            "get the model as .safetensors, or save it again with save_pretrained()"
        )
    if ggufs := sorted(folder.glob("*.gguf")):
        return f"{folder} holds no .safetensors file; to serve a GGUF pass the file itself: {ggufs[0]}"
    return f"{folder} holds no .safetensors file: download the model's weights into it"


def _weight_map(folder: Path) -> dict[str, str]:
    file = folder / INDEX_FILE
    try:
        found = json.loads(file.read_bytes())["weight_map"]
        return {str(name): str(shard) for name, shard in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"{file} is not a readable index ({error!r}): download it again") from error


def _check_index(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Every tensor that the index promises must be there."""
    if not (folder / INDEX_FILE).is_file():
        return
    for name, shard in _weight_map(folder).items():
        if name not in tensors:
            raise StartupError(
                f"{folder / shard} lacks tensor {name!r} that {INDEX_FILE} promises: download it again"
            )


def _read_header(file: Path) -> list[StoredTensor]:
    """The tensors of one file; checks that the file is exactly as long as its header says."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, size - 8):
            raise StartupError(_bad_file(file, start))
        raw = stream.read(header_bytes)
    data_start = 8 + header_bytes
    try:
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        tensors = [_stored_tensor(file, data_start, name, entry) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"{file} has a corrupt header ({error!r}): download it again") from error
    needed = max((t.offset + t.num_bytes for t in tensors), default=data_start)
    if size != needed:
        raise StartupError(
            f"{file} has {size} bytes where its header says {needed}: it is truncated or corrupt; "
            "download it again"
        )
    return tensors


def _stored_tensor(file: Path, data_start: int, name: str, entry: Mapping[str, Any]) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    if (
        not 0 <= begin <= end
        or any(size < 0 for size in shape)
        or (math.prod(shape) == 0) != (begin == end)
    ):
        raise ValueError(f"tensor {name!r} has shape {shape} and bytes {begin} to {end}")
    return StoredTensor(name, str(entry["dtype"]), shape, file, data_start + begin, end - begin)


def _bad_file(file: Path, start: bytes) -> str:
    if start.startswith(b"version "):
        return f"{file} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder"
    return f"{file} is not a safetensors file, or is truncated: download it again"
