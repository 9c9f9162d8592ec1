"""Repairs Triton's interpreter for bfloat16 and float8, which it gets wrong, and lets it check memory.

The interpreter keeps bfloat16 as raw 16-bit integers: it rounds by cutting off, adds and multiplies the
integers, and feeds them to `dot`. Its conversions to float8 lose carries and do not saturate. Here the
conversions are right, `dot` takes what the numbers mean, and other arithmetic on bfloat16 raises, since
kernels should cast to float32 first. Written for Triton 3.9; 3.6 and 3.8 have the same names.

It also prepares the language for every call of one kernel by another, and looks for what there is to
prepare for every launch: a third of all its time. Here it does both once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.runtime import interpreter

Array = npt.NDArray[Any]
_Builder = interpreter.InterpreterBuilder
_FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
_CASTS = (
    "create_si_to_fp",
    "create_ui_to_fp",
    "create_fp_to_si",
    "create_fp_to_ui",
    "create_fp_ext",
    "create_fp_trunc",
)


def widen(bits: Array) -> Array:
    """bfloat16 bits -> float32."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def narrow(numbers: Array) -> Array:
    """float32 -> bfloat16 bits, to nearest, ties to even."""
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded)


def _to_float8(numbers: Array, dtype: torch.dtype) -> Array:
    """Saturating, as GPUs convert."""
    limit = torch.finfo(dtype).max
    wide = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32))
    codes: Array = wide.clamp(-limit, limit).to(dtype).view(torch.uint8).numpy()
    return codes.reshape(numbers.shape)


def _from_float8(codes: Array, dtype: torch.dtype) -> Array:
    wide: Array = torch.from_numpy(np.ascontiguousarray(codes)).view(dtype).float().numpy()
    return wide


@dataclass
class MemoryCheck:
    """Which memory may kernels touch, and who wrote where in the launch that runs?"""

    is_on: bool = False
    ranges: list[tuple[int, int]] = field(default_factory=list)
    program: Any = None
    own: set[int] = field(default_factory=set)
    """What the program that runs has written; programs run one after the other."""
    others: set[int] = field(default_factory=set)

    def begin_launch(self, arguments: list[Any]) -> None:
        self.program, self.own, self.others = None, set(), set()
        self.ranges = [_range(each) for each in arguments if isinstance(each, torch.Tensor)]

    def check(self, pointers: Any, mask: Any, what: str) -> Array:
        """The addresses of all active lanes. Raises `IndexError` for those in no argument's storage."""
        shape = np.broadcast(pointers.data, mask.data).shape
        active = np.broadcast_to(pointers.data, shape)[np.broadcast_to(mask.data, shape)]
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        inside = np.zeros(active.shape, dtype=bool)
        for start, stop in self.ranges:
            inside |= (active >= start) & (active + size <= stop)
        if not inside.all():
            raise IndexError(f"{what} out of bounds: {int((~inside).sum())} of {active.size} lanes")
        return active

    def note_writes(self, addresses: Array, program: Any) -> None:
        """Raises `RuntimeError` where another program of the launch has written."""
        fresh = set(addresses.ravel().tolist())
        if self.program != program:
            self.others |= self.own
            self.program, self.own = program, set()
        if not fresh.isdisjoint(self.others):
            raise RuntimeError(f"write race: {program} and a program before it write one address")
        self.own |= fresh


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


@contextmanager
def repaired() -> Iterator[MemoryCheck]:
    """The interpreter computes rightly inside; switch the check on by `is_on`."""
    check = MemoryCheck()
    patches = [*_arithmetic(), *_memory(check), *_language()]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, replacement in patches:
        setattr(owner, name, replacement)
    try:
        yield check
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


def _arithmetic() -> list[tuple[Any, str, Any]]:
    convert, dot, binary, cast = (
        interpreter._convert_float,
        _Builder.create_dot,
        _Builder.binary_op,
        _Builder.cast_impl,
    )

    def converted(numbers: Array, source: Any, target: Any, rounding: Any) -> Array:
        truncates = rounding == interpreter._ir.ROUNDING_MODE.RTZ
        if source == tl.bfloat16 and target == tl.float32:
            return widen(numbers).view(np.uint32)
        if source == tl.float32 and target == tl.bfloat16 and not truncates:
            return narrow(numbers)
        if target in _FLOAT8 and not truncates:
            wide = widen(numbers) if source == tl.bfloat16 else np.asarray(numbers, dtype=np.float32)
            return _to_float8(wide, _FLOAT8[target])
        if source in _FLOAT8 and target == tl.bfloat16:
            return narrow(_from_float8(numbers, _FLOAT8[source]))
        result: Array = convert(numbers, source, target, rounding)
        return result

    def dotted(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _widened(a), _widened(b), *rest)

    def combined(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if left.dtype.scalar == tl.bfloat16:
            raise TypeError(
                f"{operation.__name__} on bfloat16, which the interpreter gets wrong: cast first"
            )
        return binary(self, left, right, operation)

    def casted(self: Any, value: Any, target: Any) -> Any:
        source, scalar = value.dtype.scalar, target.scalar
        if source == tl.bfloat16 and scalar not in (tl.float32, tl.bfloat16):
            value = _widened(value)
        if scalar == tl.bfloat16 and source not in (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(narrow(value.data.astype(np.float32)), tl.bfloat16)
        return cast(self, value, target)

    return [
        (interpreter, "_convert_float", converted),
        (_Builder, "create_dot", dotted),
        (_Builder, "binary_op", combined),
        (_Builder, "cast_impl", casted),
        *((_Builder, name, lambda self, value, target: self.cast_impl(value, target)) for name in _CASTS),
    ]


def _language() -> list[tuple[Any, str, Any]]:
    """Launches prepare the language and undo it; calls within a launch only prepare, and for good."""
    prepare = interpreter._patch_lang
    prepared: set[Any] = set()
    builtins: dict[Any, list[str]] = {}

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in prepared:
            prepare(self.fn)
            prepared.add(self.fn)
        return self.rewrite()(*args, **kwargs)

    def prepare_builtins(package: Any, builder: Any, scope: Any) -> None:
        if package not in builtins:
            members = inspect.getmembers(package)
            builtins[package] = [name for name, member in members if tl.core.is_builtin(member)]
        for name in builtins[package]:
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    return [
        (interpreter.InterpretedFunction, "__call__", called),
        (interpreter, "_patch_builtin", prepare_builtins),
    ]


def _widened(value: Any) -> Any:
    if value.dtype.scalar != tl.bfloat16:
        return value
    return interpreter.TensorHandle(widen(value.data), tl.float32)


def _memory(check: MemoryCheck) -> list[tuple[Any, str, Any]]:
    load, store, begin = (
        _Builder.create_masked_load,
        _Builder.create_masked_store,
        interpreter.GridExecutor._init_args_hst,
    )

    def began(self: Any, arguments: Any, keywords: Any) -> Any:
        """The host's copies, made here, are what the kernels touch."""
        copies, keyword_copies = begin(self, arguments, keywords)
        check.begin_launch([*copies, *keyword_copies.values()])
        return copies, keyword_copies

    def loaded(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        if check.is_on:
            check.check(pointers, mask, "load")
        return load(self, pointers, mask, *rest)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if check.is_on:
            check.note_writes(check.check(pointers, mask, "store"), self.grid_idx)
        return store(self, pointers, value, mask, *rest)

    return [
        (_Builder, "create_masked_load", loaded),
        (_Builder, "create_masked_store", stored),
        (interpreter.GridExecutor, "_init_args_hst", began),
    ]
