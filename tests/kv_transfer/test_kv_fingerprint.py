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


def test_equal_fingerprints_are_compatible() -> None:
    check_compatible(MINE, replace(MINE))


@pytest.mark.parametrize("name", [field.name for field in fields(Fingerprint)])
def test_any_difference_is_a_mismatch_that_shows_the_field_and_both_sides(name: str) -> None:
    value = getattr(MINE, name)
    theirs = replace(MINE, **{name: value + 1 if isinstance(value, int) else f"other-{value}"})
    with pytest.raises(LayoutMismatch) as caught:
        check_compatible(MINE, theirs)
    assert f"{name}: {value!r} here" in caught.value.message
    assert str(MINE) in caught.value.message
    assert str(theirs) in caught.value.message
