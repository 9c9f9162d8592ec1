"""Packed weights in one file that any number of workers map: read once, held in memory once.

    head: magic, place and digest of the index | parts, each at a multiple of ALIGNMENT | index

The index is JSON: the key that the parts were packed for, and per part its type, shape and place. It is
written last and found by the head; so a file is whole when its size is the index's end and the digest of
the index is right. The parts themselves are not read to check them.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from protocol.errors import StartupError

if TYPE_CHECKING:
    import torch

    from engine.model.weights import Part

MAGIC = b"splitserve packed weights 1\n"
ALIGNMENT = 4096
_HEAD = struct.Struct(f"<{len(MAGIC)}sQQ32s")
_FLOAT_TYPES = ("float32", "bfloat16")

Key = Mapping[str, str]


def write_parts(file: Path, key: Key, parts: Iterable[tuple[str, Part]]) -> None:
    """Write the parts one by one, as they come."""
    from engine.ops import Linear, LinearStack

    entries: dict[str, dict[str, Any]] = {}
    with file.open("wb") as stream:
        stream.write(bytes(ALIGNMENT))
        for name, part in parts:
            if isinstance(part, Linear):
                entries[name] = {"out_features": part.out_features, "weight": _append(stream, part.weight)}
                if part.bias is not None:
                    entries[name]["bias"] = _append(stream, part.bias)
            elif isinstance(part, LinearStack):
                weights = _append(stream, cast("torch.Tensor", part.weights))
                entries[name] = {"out_features": part.out_features, "weights": weights}
            else:
                entries[name] = {"weight": _append(stream, part)}
        index = json.dumps({"key": dict(key), "parts": entries}).encode()
        start = stream.tell()
        stream.write(index)
        stream.seek(0)
        stream.write(_HEAD.pack(MAGIC, start, len(index), hashlib.sha256(index).digest()))


def map_parts(file: Path, key: Key) -> dict[str, Part]:
    """The parts, views of the mapped file: nobody may write to them.

    Raises `StartupError` when the file is not whole, or was made for another key.
    """
    index = _read_index(file)
    if index["key"] != dict(key):
        raise StartupError(f"{file} was made for {index['key']}, not for {dict(key)}")
    area = _map(file)
    return {name: _part(area, entry) for name, entry in index["parts"].items()}


def _part(area: mmap.mmap, entry: Mapping[str, Any]) -> Part:
    from engine.ops import Linear, LinearStack

    if "weights" in entry:
        return LinearStack(_view(area, entry["weights"]), entry["out_features"])
    weight = _view(area, entry["weight"])
    if "out_features" not in entry:
        return weight
    return Linear(weight, _view(area, entry["bias"]) if "bias" in entry else None, entry["out_features"])


def _append(stream: BinaryIO, tensor: torch.Tensor) -> dict[str, Any]:
    import torch

    start = -(-stream.tell() // ALIGNMENT) * ALIGNMENT
    stream.seek(start)
    stream.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "start": start}


def _read_index(file: Path) -> Any:
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise StartupError(f"{file} is truncated")
        magic, start, num_bytes, digest = _HEAD.unpack(head)
        if magic != MAGIC or start + num_bytes != size:
            raise StartupError(f"{file} is no file of packed weights, or is truncated")
        stream.seek(start)
        index = stream.read(num_bytes)
    if hashlib.sha256(index).digest() != digest:
        raise StartupError(f"{file} is damaged: its index is not what was written")
    return json.loads(index)


def _map(file: Path) -> mmap.mmap:
    """Private, since torch asks for writable memory: pages are the file's as long as nobody writes."""
    with file.open("rb") as stream:
        area = mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    return area


def _view(area: mmap.mmap, entry: Mapping[str, Any]) -> torch.Tensor:
    from math import prod

    import torch

    dtype = {name: getattr(torch, name) for name in _FLOAT_TYPES}[entry["dtype"]]
    values = torch.frombuffer(area, dtype=dtype, count=prod(entry["shape"]), offset=entry["start"])
    return values.view(entry["shape"])
