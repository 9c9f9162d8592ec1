"""Which calls did a step make? Those of the next step are the same ones, on the same memory."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from math import prod

import torch

_CALL = struct.Struct("@PqP")
"""`Call` in kernels.cpp."""


class Workspace:
    """Memory for the results of recorded calls. All recordings use the same, since one runs at a time."""

    def __init__(self) -> None:
        self._areas: list[torch.Tensor] = []

    def take(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The memory of a recording's `index`th result; the indices of one count up from 0."""
        num_bytes = prod(shape) * dtype.itemsize
        if index == len(self._areas):
            self._areas.append(torch.empty(0, dtype=torch.uint8))
        if self._areas[index].nbytes < num_bytes:
            # Doubled, so that recordings of ever more rows leave no more behind than the last one needs.
            self._areas[index] = torch.empty(1 << (num_bytes - 1).bit_length(), dtype=torch.uint8)
        return self._areas[index][:num_bytes].view(dtype).view(shape)


class Tape:
    """Records calls with their arguments, and the memory that they need; then repeats them all at once."""

    def __init__(
        self, workspace: Workspace, replay: Callable[[ctypes.Array[ctypes.c_char], int], None]
    ) -> None:
        """`replay` takes an array of C calls and their number."""
        self._workspace = workspace
        self._replay = replay
        self._calls: list[tuple[int, int, ctypes.Array[ctypes.c_char]]] = []
        self._kept: list[torch.Tensor] = []
        self._array = ctypes.create_string_buffer(0)

    def note(self, function: int, dtype: int, arguments: bytes) -> None:
        self._calls.append((function, dtype, ctypes.create_string_buffer(arguments, len(arguments))))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a result, kept as long as the tape is."""
        self._kept.append(self._workspace.take(len(self._kept), shape, dtype))
        return self._kept[-1]

    def seal(self) -> None:
        """The recording is complete."""
        packed = (_CALL.pack(function, dtype, ctypes.addressof(a)) for function, dtype, a in self._calls)
        content = b"".join(packed)
        self._array = ctypes.create_string_buffer(content, len(content))

    def replay(self) -> None:
        self._replay(self._array, len(self._calls))
