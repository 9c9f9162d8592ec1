"""Which bytes of a checkpoint does one rank of several read? Those of its shard, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.weights.checkpoint import StoredTensor
from protocol.errors import StartupError

if TYPE_CHECKING:
    import torch

    from engine.parallel import Cut, Shard


def read_tensor(opened: Any, stored: StoredTensor, shard: Shard | None) -> torch.Tensor:
    """A tensor of an opened safetensors file, or the shard's part of it.

    A view of the mapped file: the bytes of other parts are not read. Raises `StartupError` for a shape
    that config.json does not imply.
    """
    if shard and shard.is_added_elsewhere(stored.name):
        import torch

        return torch.zeros(stored.shape)
    name, cut = stored.stored_as or stored.name, shard.cut(stored.name) if shard else None
    if cut is None and stored.matrix is None:
        return _tensor(opened.get_tensor(name))
    return _tensor(opened.get_slice(name)[_places(stored, cut)])


def _places(stored: StoredTensor, cut: Cut | None) -> tuple[int | slice, ...]:
    """Where in what is stored the wanted part lies."""
    starts, stops = [0] * len(stored.shape), list(stored.shape)
    if cut:
        _check(stored, cut)
        starts[cut.axis], stops[cut.axis] = cut.span.start, cut.span.stop
    index, first_row = stored.matrix or (None, 0)
    starts[0] += first_row
    stops[0] += first_row
    places = tuple(slice(start, stop) for start, stop in zip(starts, stops, strict=True))
    return places if index is None else (index, *places)


def _check(stored: StoredTensor, cut: Cut) -> None:
    if len(stored.shape) <= cut.axis or stored.shape[cut.axis] != cut.total:
        raise StartupError(
            f"the weight {stored.name!r} is {stored.shape}; config.json implies {cut.total} "
            f"along dimension {cut.axis}"
        )


def part_bytes(stored: StoredTensor, shard: Shard | None) -> int:
    """How many bytes of the tensor `read_tensor` gives."""
    cut = shard.cut(stored.name) if shard else None
    if cut is None or not cut.total:
        return stored.num_bytes
    return stored.num_bytes * len(cut.span) // cut.total


def byte_range(stored: StoredTensor, shard: Shard | None) -> tuple[int, int]:
    """(offset, length) in its file of what is read in one go; columns lie all over the tensor."""
    cut = shard.cut(stored.name) if shard else None
    if cut is None or cut.axis != 0 or not cut.total:
        return stored.offset, stored.num_bytes
    row_bytes = stored.num_bytes // cut.total
    return stored.offset + cut.span.start * row_bytes, len(cut.span) * row_bytes


def _tensor(value: Any) -> torch.Tensor:
    found: torch.Tensor = value
    return found
