"""What a GGUF file holds: its metadata, and where each tensor's bytes lie.

Own reader instead of the gguf package's: that one makes several numpy arrays per vocabulary entry
and takes seconds where this one takes a tenth. Format: the GGUF specification in the ggml project.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import StartupError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor as the file stores it."""

    name: str
    shape: tuple[int, ...]
    """In torch's order: rows first. Empty never."""
    kind: int
    """ggml's number of the storage type."""
    offset: int
    """Of its first byte, from the start of the file."""
    num_bytes: int

    @property
    def num_rows(self) -> int:
        """Rows are quantised one by one, so they can be moved apart. Those of a vector are its elements,
        those of a stack of matrices all of theirs.
        """
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else self.shape[0]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open file. Its mapping ends with the last reference to it, since arrays may still look into it."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    data: mmap.mmap

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def of_architecture(self, key: str, default: Any = None) -> Any:
        """The metadata value `<architecture>.<key>`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number at `<architecture>.<key>`; `StartupError` without it, or where it is a list."""
        return int(self._checked(key, default, (int,)))

    def number(self, key: str, default: float | None = None) -> float:
        """A number at `<architecture>.<key>`; `StartupError` without it."""
        return float(self._checked(key, default, (int, float)))

    def _checked(self, key: str, default: float | None, kinds: tuple[type, ...]) -> Any:
        value = self.of_architecture(key, default)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise StartupError(
                f"{self.path}: the metadata {self.architecture}.{key} is no {kinds[-1].__name__} "
                f"({str(value)[:40]}): get another file"
            )
        return value


class _CorruptFileError(Exception):
    """The bytes do not follow the format; translated by `read_gguf`."""


def read_gguf(path: Path) -> GgufFile:
    """Read the header and check that all tensors lie inside the file.

    Raises `StartupError` for a file that is not GGUF, truncated, corrupt, split or of a storage type
    that is not known.
    """
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise StartupError(f"{path} is not a GGUF file: get it again, or pass a model folder")
        return _parse(path, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))


def _parse(path: Path, data: mmap.mmap) -> GgufFile:
    try:
        cursor = _Cursor(data, position=4)
        (version,) = cursor.take("I")
        if version not in _VERSIONS:
            raise StartupError(f"{path} is GGUF version {version}; supported: {_VERSIONS}, little-endian")
        num_tensors, num_pairs = cursor.take("QQ")
        metadata = dict(cursor.pair() for _ in range(num_pairs))
        if int(metadata.get("split.count", 1)) > 1:
            raise StartupError(
                f"{path} is one part of a split model: join the parts with gguf-split --merge"
            )
        entries = [cursor.tensor_entry() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", 32))
        data_start = -(-cursor.position // alignment) * alignment
        tensors = {entry[0]: _located(path, entry, data_start, len(data)) for entry in entries}
    except (struct.error, UnicodeDecodeError, OverflowError, ZeroDivisionError, _CorruptFileError) as error:
        raise StartupError(f"{path} is truncated or corrupt ({error}): download it again") from error
    if len(tensors) != len(entries):
        raise StartupError(f"{path} is corrupt (a tensor occurs twice): download it again")
    return GgufFile(path, metadata, tensors, data)


_Entry = tuple[str, tuple[int, ...], int, int]


def _located(path: Path, entry: _Entry, data_start: int, file_bytes: int) -> GgufTensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name, shape, kind, offset = entry
    if not shape or min(shape) < 1:
        raise _CorruptFileError(f"tensor {name!r} has shape {shape}")
    if kind not in {int(known) for known in GGMLQuantizationType}:
        raise StartupError(f"{path}: tensor {name!r} is stored in a way that is not known (type {kind})")
    block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if shape[-1] % block_elements or (block_elements > 1 and len(shape) < 2):
        raise _CorruptFileError(f"rows of tensor {name!r} are no whole number of blocks")
    num_bytes = math.prod(shape) // block_elements * block_bytes
    end = data_start + offset + num_bytes
    if end > file_bytes:
        raise _CorruptFileError(f"tensor {name!r} ends at byte {end} of a file of {file_bytes}")
    return GgufTensor(name, shape, kind, data_start + offset, num_bytes)


class _Cursor:
    """Reads values one after the other; `struct.error` past the end."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self._data = data
        self.position = position

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._data, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def string(self) -> str:
        (length,) = self.take("Q")
        raw = self._data[self.position : self.position + length]
        if len(raw) != length:
            raise _CorruptFileError("a string ends past the end of the file")
        self.position += length
        return raw.decode()

    def pair(self) -> tuple[str, Any]:
        key = self.string()
        (kind,) = self.take("I")
        return key, self.value(kind)

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise _CorruptFileError(f"a value is of the unknown type {kind}")
        element_kind, count = self.take("IQ")
        if element_kind in _SCALARS:
            return list(self.take(f"{count}{_SCALARS[element_kind]}"))
        return [self.value(element_kind) for _ in range(count)]

    def tensor_entry(self) -> _Entry:
        name = self.string()
        (num_dims,) = self.take("I")
        dims = self.take(f"{num_dims}Q")
        kind, offset = self.take("IQ")
        return name, tuple(reversed(dims)), kind, offset  # ggml counts the fastest dimension first
