"""What does the compiled library offer to Python? Its functions, and the layout of their arguments.

Each `struct.Struct` here mirrors the C struct of the same name: packing one into a buffer costs a third
of filling a `ctypes.Structure`, and a step makes hundreds of calls.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

import torch

from engine.ops.cpu.build import instruction_set_of
from engine.ops.cpu.tape import Tape, Workspace

Call = Callable[..., None]
"""Takes the dtype (0: float32, 1: bfloat16) and the fields of the C struct, in order."""

_ARGS_BYTES = 256


class Epilogue(IntEnum):
    """What a linear does with its sums, as `linear.h` numbers it."""

    STORE = 0
    GATE = 1
    FLOAT32 = 2


class Library:
    """One loaded library and its team of threads. Used by one thread at a time.

    The team ends when the object does; there is nothing to close.
    """

    def __init__(self, path: Path, num_threads: int) -> None:
        self._functions = ctypes.CDLL(str(path))
        self._arguments = ctypes.create_string_buffer(_ARGS_BYTES)
        self._pool = self._create_pool(num_threads)
        self._tapes: list[Tape] = []  # the one that records, if any
        self._workspace = Workspace()
        self.instruction_set = instruction_set_of(path)
        self.panel_columns: int = self._functions.splitserve_panel_columns()
        self.linear = self._call("linear", "@4P5qi")
        self.attention = self._call("attention", "@7P6q6if")
        self.rms_norm = self._call("rms_norm", "@4P8qf")
        self.rope = self._call("rope", "@3P6q")
        self.write_kv = self._call("write_kv", "@5P9q")
        self.route = self._call("route", "@3P3qi")
        self.experts = self._call("experts", "@6P7q")
        self.draw = self._call("draw", "@3P3q")
        self.pack = self._call("pack", "@2P3qP")

    @contextmanager
    def recording(self) -> Iterator[Tape]:
        """Every call that is made meanwhile, and every tensor of `empty`, is on the tape, too."""
        replay, pool = self._functions.splitserve_replay, self._pool
        replay.argtypes, replay.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64], None
        tape = Tape(self._workspace, lambda calls, num_calls: replay(pool, calls, num_calls))
        self._tapes.append(tape)
        try:
            yield tape
        finally:
            self._tapes.pop()
        tape.seal()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a result."""
        return self._tapes[-1].empty(shape, dtype) if self._tapes else torch.empty(shape, dtype=dtype)

    def step_depth(self, dtype: int) -> int:
        """Values of the inner dimension that lie together in a packed matrix."""
        depth: int = self._functions.splitserve_step_depth(dtype)
        return depth

    def _create_pool(self, num_threads: int) -> int:
        create = self._functions.splitserve_pool_create
        create.argtypes, create.restype = [ctypes.c_int32], ctypes.c_void_p
        destroy = self._functions.splitserve_pool_destroy
        destroy.argtypes, destroy.restype = [ctypes.c_void_p], None
        pool: int = create(num_threads)
        weakref.finalize(self, destroy, pool)
        return pool

    def _call(self, name: str, layout: str) -> Call:
        function = getattr(self._functions, f"splitserve_{name}")
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p], None
        form, arguments, pool, tapes = struct.Struct(layout), self._arguments, self._pool, self._tapes
        pack_into, address = form.pack_into, ctypes.addressof(arguments)
        function_address = ctypes.cast(function, ctypes.c_void_p).value or 0

        def call(dtype: int, *fields: float) -> None:
            pack_into(arguments, 0, *fields)
            function(pool, dtype, address)
            for tape in tapes:
                tape.note(function_address, dtype, form.pack(*fields))

        return call
