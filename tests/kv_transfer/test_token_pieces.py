"""A range of tokens, cut at the edges of both sides' blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport_kit import blocks

from kv_transfer.layout import BlockLayout, Piece, blocks_over, entries, pieces
from protocol.errors import LayoutMismatch, TransferFailed
from protocol.handoff import Fingerprint
from protocol.rank_layout import KvPart

SIZES = st.integers(1, 40)


@st.composite
def ranges(draw: st.DrawFn) -> range:
    start = draw(st.integers(0, 200))
    return range(start, start + draw(st.integers(0, 200)))


def positions(piece: Piece, block_size: int, side: str) -> range:
    """Where in the prompt the piece's tokens are, by one side's reckoning."""
    first = getattr(piece, f"{side}_index") * block_size + getattr(piece, f"{side}_offset")
    return range(first, first + piece.num_tokens)


@given(ranges(), SIZES, SIZES)
def test_pieces_cover_every_token_once_in_order_at_the_same_position_on_both_sides(
    tokens: range, their_size: int, my_size: int
) -> None:
    cut = list(pieces(tokens, their_size, my_size))
    theirs = [position for piece in cut for position in positions(piece, their_size, "their")]
    mine = [position for piece in cut for position in positions(piece, my_size, "my")]
    assert theirs == mine == list(tokens)


@given(ranges(), SIZES, SIZES)
def test_no_piece_crosses_an_edge_and_none_is_smaller_than_it_must_be(
    tokens: range, their_size: int, my_size: int
) -> None:
    cut = list(pieces(tokens, their_size, my_size))
    for piece in cut:
        assert piece.num_tokens > 0
        assert piece.their_offset + piece.num_tokens <= their_size
        assert piece.my_offset + piece.num_tokens <= my_size
    edges = {p for p in tokens if p % their_size == 0 or p % my_size == 0} | set(tokens[:1])
    assert len(cut) == len(edges)


@given(ranges(), SIZES)
def test_equal_sizes_give_one_piece_per_block(tokens: range, size: int) -> None:
    cut = list(pieces(tokens, size, size))
    assert [piece.my_index for piece in cut] == list(blocks_over(tokens, size))
    assert all(piece.my_offset == piece.their_offset for piece in cut)


@given(ranges(), SIZES)
def test_the_blocks_over_a_range_are_those_that_hold_any_of_it(tokens: range, size: int) -> None:
    assert set(blocks_over(tokens, size)) == {position // size for position in tokens}


def test_the_example_of_the_docstring() -> None:
    cut = [(p.their_index, p.my_index, p.num_tokens) for p in pieces(range(1, 10), 4, 6)]
    assert cut == [(0, 0, 3), (1, 0, 2), (1, 1, 2), (2, 1, 2)]


def test_a_table_that_is_too_short_is_told() -> None:
    assert list(entries(blocks(5, 6, 7), range(1, 3), "my")) == [6, 7]
    assert list(entries(blocks(5), range(0), "my")) == []
    with pytest.raises(TransferFailed, match="my block table has 3 entries, not 1 to 3"):
        entries(blocks(5, 6, 7), range(1, 4), "my")


def test_a_layout_knows_its_blocks_size() -> None:
    fingerprint = Fingerprint("m", "r", "bfloat16", "bfloat16", 5, 3, 64, 16)
    layout = BlockLayout.of(fingerprint, KvPart(range(5), range(3)))
    assert (layout.num_rows, layout.block_bytes) == (30, 30 * 16 * 64 * 2)
    stage = BlockLayout.of(fingerprint, KvPart(range(2, 4), range(1, 2)))
    assert (stage.num_rows, stage.block_bytes) == (4, 4 * 16 * 64 * 2)


def test_kv_of_a_type_that_cannot_be_converted_has_no_layout() -> None:
    with pytest.raises(LayoutMismatch, match="int8"):
        BlockLayout.of(Fingerprint("m", "r", "float32", "int8", 5, 3, 64, 16), KvPart(range(5), range(3)))
