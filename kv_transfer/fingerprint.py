"""May two workers exchange KV? Asked once per pair, before any traffic."""

from __future__ import annotations

from dataclasses import replace

from kv_transfer.layout import ITEM_BYTES
from protocol.errors import LayoutMismatch
from protocol.handoff import Fingerprint


def check_compatible(mine: Fingerprint, theirs: Fingerprint) -> None:
    """Raise `LayoutMismatch`, with what differs and both sides whole, unless KV can pass between the two.

    Either side may compute and store in float32 or bfloat16, in blocks of any size, on any number of
    ranks: the reader repacks and converts what it reads. Everything else must be equal.
    """
    differences = mine.differences(_as_converted(theirs, mine))
    if differences:
        raise LayoutMismatch(
            f"KV cannot be exchanged: {'; '.join(differences)}. Here: {mine}. There: {theirs}."
        )


def _as_converted(theirs: Fingerprint, mine: Fingerprint) -> Fingerprint:
    """What is theirs once a reader has made equal what it can."""
    return replace(
        theirs,
        dtype=mine.dtype if _are_convertible(theirs.dtype, mine.dtype) else theirs.dtype,
        kv_dtype=mine.kv_dtype if _are_convertible(theirs.kv_dtype, mine.kv_dtype) else theirs.kv_dtype,
        block_size=mine.block_size if _can_be_repacked(theirs, mine) else theirs.block_size,
        tensor_parallel_size=mine.tensor_parallel_size,
        pipeline_parallel_size=mine.pipeline_parallel_size,
    )


def _can_be_repacked(theirs: Fingerprint, mine: Fingerprint) -> bool:
    return _are_convertible(theirs.kv_dtype, mine.kv_dtype) and theirs.block_size > 0


def _are_convertible(*dtypes: str) -> bool:
    return ITEM_BYTES.keys() >= set(dtypes)
