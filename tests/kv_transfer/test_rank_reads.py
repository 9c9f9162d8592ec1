"""KV between workers of unequal ranks: every byte comes once, and from its layer and head."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kv_transfer.parts import RankRead, num_rows, rank_reads
from kv_transfer.spans import check_spans, merged, place_of_byte, span_bytes
from protocol.handoff import Span
from protocol.rank_layout import KvPart, RankLayout, kv_parts

HEAD_BYTES = 5
layouts = st.builds(RankLayout, st.integers(1, 9), st.integers(1, 4))


def reads_of(
    num_layers: int, num_kv_heads: int, theirs: RankLayout, mine: RankLayout, my_rank: int
) -> tuple[RankRead, ...]:
    return rank_reads(
        num_layers, num_kv_heads, theirs=theirs, mine=mine, my_rank=my_rank, head_bytes=HEAD_BYTES
    )


def whole_model(num_layers: int, num_kv_heads: int) -> NDArray[np.uint32]:
    """One block of the whole model, `[layers, 2, heads, bytes]`; every byte has a number of its own."""
    shape = num_layers, 2, num_kv_heads, HEAD_BYTES
    return np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)


def block_of(whole: NDArray[np.uint32], part: KvPart) -> NDArray[np.uint32]:
    layers, heads = part.layers, part.heads
    return whole[layers.start : layers.stop, :, heads.start : heads.stop].ravel()


@given(st.integers(4, 9), st.integers(1, 12), layouts, layouts)
def test_every_byte_of_a_block_comes_once_and_from_its_layer_and_head(
    num_layers: int, num_kv_heads: int, theirs: RankLayout, mine: RankLayout
) -> None:
    whole = whole_model(num_layers, num_kv_heads)
    owners = [block_of(whole, part) for part in kv_parts(num_layers, num_kv_heads, theirs)]
    for my_rank, part in enumerate(kv_parts(num_layers, num_kv_heads, mine)):
        expected = block_of(whole, part)
        found = np.full_like(expected, 2**32 - 1)
        num_writes = np.zeros_like(expected)
        for read in reads_of(num_layers, num_kv_heads, theirs, mine, my_rank):
            source = owners[read.rank]
            check_spans(read.spans, their_block_bytes=len(source), my_block_bytes=len(expected))
            for span in read.spans:
                here = slice(span.my_offset, span.my_offset + span.num_bytes)
                found[here] = source[span.their_offset : span.their_offset + span.num_bytes]
                num_writes[here] += 1
        assert np.array_equal(found, expected)
        assert (num_writes == 1).all()


@given(st.integers(4, 9), st.integers(1, 12), layouts)
def test_equal_layouts_read_whole_blocks_of_their_own_rank(
    num_layers: int, num_kv_heads: int, layout: RankLayout
) -> None:
    for rank, part in enumerate(kv_parts(num_layers, num_kv_heads, layout)):
        block_bytes = num_rows(part) * HEAD_BYTES
        expected = (RankRead(rank, (Span(0, 0, block_bytes),)),)
        assert reads_of(num_layers, num_kv_heads, layout, layout, rank) == expected


@given(st.integers(4, 9), st.integers(1, 12), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4))
def test_stages_alone_cut_blocks_into_one_span_for_each_rank_that_is_read_from(
    num_layers: int, num_kv_heads: int, tensor: int, theirs: int, mine: int
) -> None:
    """Layers are neighbours in a block, heads are not."""
    for rank in range(tensor * mine):
        reads = reads_of(
            num_layers, num_kv_heads, RankLayout(tensor, theirs), RankLayout(tensor, mine), rank
        )
        assert [len(read.spans) for read in reads] == [1] * len(reads)


def ranks_read(num_kv_heads: int, theirs: RankLayout, mine: RankLayout) -> list[list[int]]:
    return [
        [read.rank for read in reads_of(4, num_kv_heads, theirs, mine, rank)]
        for rank in range(mine.num_ranks)
    ]


@pytest.mark.parametrize(
    ("num_kv_heads", "theirs", "mine", "expected"),
    [
        (8, RankLayout(1), RankLayout(2), [[0], [0]]),
        (8, RankLayout(2), RankLayout(1), [[0, 1]]),
        (8, RankLayout(2), RankLayout(4), [[0], [0], [1], [1]]),
        (8, RankLayout(4), RankLayout(2), [[0, 1], [2, 3]]),
        (3, RankLayout(3), RankLayout(2), [[0, 1], [2]]),
        # Two heads on four ranks are replicated, and readers spread over those that hold the same.
        (2, RankLayout(4), RankLayout(2), [[0], [2]]),
        (2, RankLayout(4), RankLayout(1), [[0, 2]]),
        (1, RankLayout(2), RankLayout(4), [[0], [1], [0], [1]]),
        (2, RankLayout(8), RankLayout(8), [[rank] for rank in range(8)]),
        # Stages.
        (8, RankLayout(1, 2), RankLayout(1), [[0, 1]]),
        (8, RankLayout(2, 2), RankLayout(2), [[0, 2], [1, 3]]),
        (8, RankLayout(2, 1), RankLayout(1, 2), [[0, 1], [0, 1]]),
        (1, RankLayout(2, 2), RankLayout(2, 1), [[0, 2], [1, 3]]),
    ],
    ids=str,
)
def test_each_rank_reaches_those_that_it_needs_and_no_others(
    num_kv_heads: int, theirs: RankLayout, mine: RankLayout, expected: list[list[int]]
) -> None:
    assert ranks_read(num_kv_heads, theirs, mine) == expected


def test_half_of_the_heads_are_one_span_for_the_keys_and_one_for_the_values_of_each_layer() -> None:
    (read,) = reads_of(2, 4, RankLayout(1), RankLayout(2), my_rank=1)
    size = 2 * HEAD_BYTES
    assert read.spans == tuple(Span((2 * plane + 1) * size, plane * size, size) for plane in range(4))


spans = st.lists(st.builds(Span, st.integers(0, 50), st.integers(0, 50), st.integers(1, 20)), max_size=8)


@given(spans)
def test_merged_spans_move_the_same_bytes(given_spans: list[Span]) -> None:
    result = merged(given_spans)
    assert sorted(_moves(result)) == sorted(_moves(given_spans))
    assert merged(result) == result


def _moves(these: list[Span] | tuple[Span, ...]) -> list[tuple[int, int]]:
    return [(s.their_offset + i, s.my_offset + i) for s in these for i in range(s.num_bytes)]


def test_bytes_of_a_read_are_found_in_the_block() -> None:
    two = (Span(7, 10, 3), Span(90, 20, 2))
    assert [place_of_byte(i, two) for i in range(span_bytes(two))] == [10, 11, 12, 20, 21]
    with pytest.raises(IndexError):
        place_of_byte(5, two)
