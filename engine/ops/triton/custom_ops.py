"""Registers a launcher of kernels with torch, as an op that torch looks into no further.

Opaque ops are what fake tensors, `make_fx`, `torch.compile` and CUDA graphs all get along with. Every
one writes to memory that its caller made (the arguments marked `!` in the schema) and returns nothing,
so that its fake has nothing to do. A plain `Library` costs a tenth of `torch.library.custom_op` per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("splitserve", "DEF")  # type: ignore[no-untyped-call]

Launcher = Callable[..., None]


def custom_op(arguments: str) -> Callable[[Launcher], Launcher]:
    """Decorates a launcher; returns the op `splitserve::<its name>`, to be called instead.

    `arguments` is its signature in torch's schema language, without the result.
    """

    def register(launcher: Launcher) -> Launcher:
        name = launcher.__name__
        schema, tags = f"{name}({arguments}) -> ()", (torch.Tag.pt2_compliant_tag,)
        _LIBRARY.define(schema, tags=tags)  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, launcher, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"splitserve::{name}", _do_nothing, lib=_LIBRARY)
        op: Launcher = getattr(torch.ops.splitserve, name).default
        return op

    return register


def _do_nothing(*_: Any) -> None:
    """The results are memory of the caller's, whose shapes are known."""
