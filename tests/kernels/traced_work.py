"""What a CUDA graph does, without CUDA: the operations of some work are listed once, and then repeated.

As in a graph, whatever Python decided while the work was captured stays decided, and inputs are read from
where they lay. What a graph could not capture, such as a number brought to the host, raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from engine.ops import Recording

_WAITS_FOR_THE_DEVICE = ("item", "_local_scalar_dense", "nonzero", "_unique", "masked_select")
Operation = tuple[Any, tuple[Any, ...], dict[str, Any], Any]


class CannotCapture(RuntimeError):
    """The work waits for the device, or its shapes depend on what tensors hold."""


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        if name in _WAITS_FOR_THE_DEVICE or any(torch.is_tensor(i) for i in _indices(name, args)):
            raise CannotCapture(f"{name} cannot be captured")
        result = op(*args, **(kwargs or {}))
        self.operations.append((op, args, kwargs or {}, result))
        return result


def _indices(name: str, args: Any) -> list[Any]:
    """Boolean masks among the indices of `x[...]`."""
    if name != "index":
        return []
    return [each for each in args[1] if each is not None and each.dtype is torch.bool]


def capture_trace(work: Callable[[], torch.Tensor]) -> Recording:
    """Implements `Capture`."""
    with _Tape() as tape:
        output = work()

    def run() -> None:
        fresh: dict[int, torch.Tensor] = {}
        for op, args, kwargs, result in tape.operations:
            arguments = tree_map_only(torch.Tensor, lambda each: fresh.get(id(each), each), (args, kwargs))
            again = op(*arguments[0], **arguments[1])
            _note(fresh, result, again)
        output.copy_(fresh[id(output)])

    return Recording(output, run)


def _note(fresh: dict[int, torch.Tensor], before: Any, again: Any) -> None:
    """Which tensor of this run stands for which of the first."""
    if torch.is_tensor(before):
        fresh[id(before)] = again
    elif isinstance(before, list | tuple):
        for old, new in zip(before, again, strict=True):
            _note(fresh, old, new)


def run_again(work: Callable[[], torch.Tensor]) -> Recording:
    """Implements `Capture` by doing the work each time: padded, but not captured."""
    output = work().clone()

    def run() -> None:
        output.copy_(work())

    return Recording(output, run)
