"""Two workers that cannot exchange KV say why."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from kv_transfer import check_compatible
from protocol.errors import LayoutMismatch
from protocol.handoff import Fingerprint

MINE = Fingerprint(
    model="demo",
    revision="r1",
    dtype="float32",
    kv_dtype="float32",
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    block_size=16,
)


MAY_DIFFER = {"block_size", "tensor_parallel_size", "pipeline_parallel_size"}


def test_equal_fingerprints_are_compatible() -> None:
    check_compatible(MINE, replace(MINE))


@pytest.mark.parametrize("name", [f.name for f in fields(Fingerprint) if f.name not in MAY_DIFFER])
def test_a_difference_is_a_mismatch_that_shows_the_field_and_both_sides(name: str) -> None:
    value = getattr(MINE, name)
    theirs = replace(MINE, **{name: value + 1 if isinstance(value, int) else f"other-{value}"})
    assert_refused(theirs, f"{name}: {value!r} here, {getattr(theirs, name)!r} there")


@pytest.mark.parametrize("block_size", [8, 32, 24, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_block_size_and_number_type_may_differ_both_ways(
    block_size: int, dtype: str, kv_dtype: str
) -> None:
    theirs = replace(MINE, block_size=block_size, dtype=dtype, kv_dtype=kv_dtype)
    check_compatible(MINE, theirs)
    check_compatible(theirs, MINE)


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_the_number_of_ranks_may_differ_both_ways(name: str) -> None:
    theirs = replace(MINE, **{name: 4})
    check_compatible(MINE, theirs)
    check_compatible(theirs, MINE)


def test_blocks_of_no_tokens_are_refused() -> None:
    assert_refused(replace(MINE, block_size=0), "block_size: 16 here, 0 there")


def test_kv_of_a_type_that_cannot_be_converted_must_be_equal_down_to_its_blocks() -> None:
    mine = replace(MINE, kv_dtype="int8")
    check_compatible(mine, mine)
    with pytest.raises(LayoutMismatch, match="block_size: 16 here, 32 there"):
        check_compatible(mine, replace(mine, block_size=32))
    assert_refused(mine, "kv_dtype: 'float32' here, 'int8' there")


def test_what_differs_and_could_be_converted_is_not_blamed() -> None:
    theirs = replace(MINE, block_size=32, dtype="bfloat16", kv_dtype="bfloat16", num_layers=5)
    message = assert_refused(theirs, "num_layers: 30 here, 5 there")
    assert message.split(". Here:")[0] == "KV cannot be exchanged: num_layers: 30 here, 5 there"


def assert_refused(theirs: Fingerprint, difference: str) -> str:
    with pytest.raises(LayoutMismatch) as caught:
        check_compatible(MINE, theirs)
    message = caught.value.message
    assert difference in message
    assert str(MINE) in message
    assert str(theirs) in message
    return message
