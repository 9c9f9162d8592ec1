"""Heads between workers of unequal tensor parallel sizes: every rank gets its own, each once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.heads import HeadPiece, Span, block_spans, head_pieces, ranks_read_from
from protocol.rank_layout import kv_head_ranges


def pieces_of(num_kv_heads: int, theirs: int, mine: int) -> list[tuple[HeadPiece, ...]]:
    return [
        head_pieces(num_kv_heads, their_num_ranks=theirs, my_rank=rank, my_num_ranks=mine)
        for rank in range(mine)
    ]


@pytest.mark.parametrize(
    ("num_kv_heads", "theirs", "mine", "expected"),
    [
        (8, 1, 2, [(HeadPiece(0, 0, 0, 4),), (HeadPiece(0, 4, 0, 4),)]),
        (8, 2, 1, [(HeadPiece(0, 0, 0, 4), HeadPiece(1, 0, 4, 4))]),
        (
            8,
            2,
            4,
            [
                (HeadPiece(0, 0, 0, 2),),
                (HeadPiece(0, 2, 0, 2),),
                (HeadPiece(1, 0, 0, 2),),
                (HeadPiece(1, 2, 0, 2),),
            ],
        ),
        (
            8,
            4,
            2,
            [
                (HeadPiece(0, 0, 0, 2), HeadPiece(1, 0, 2, 2)),
                (HeadPiece(2, 0, 0, 2), HeadPiece(3, 0, 2, 2)),
            ],
        ),
        # SmolLM2's three heads on two ranks are two and one.
        (3, 2, 3, [(HeadPiece(0, 0, 0, 1),), (HeadPiece(0, 1, 0, 1),), (HeadPiece(1, 0, 0, 1),)]),
        (3, 3, 2, [(HeadPiece(0, 0, 0, 1), HeadPiece(1, 0, 1, 1)), (HeadPiece(2, 0, 0, 1),)]),
        # Two heads on four ranks are replicated.
        (2, 4, 2, [(HeadPiece(0, 0, 0, 1),), (HeadPiece(2, 0, 0, 1),)]),
        (2, 4, 1, [(HeadPiece(0, 0, 0, 1), HeadPiece(2, 0, 1, 1))]),
        (2, 1, 4, [(HeadPiece(0, 0, 0, 1),)] * 2 + [(HeadPiece(0, 1, 0, 1),)] * 2),
    ],
)
def test_pieces_of_known_layouts(
    num_kv_heads: int, theirs: int, mine: int, expected: list[tuple[HeadPiece, ...]]
) -> None:
    assert pieces_of(num_kv_heads, theirs, mine) == expected


@given(st.integers(1, 64), st.integers(1, 32), st.integers(1, 32))
def test_every_rank_gets_its_heads_in_order(num_kv_heads: int, theirs: int, mine: int) -> None:
    owners = kv_head_ranges(num_kv_heads, theirs)
    for heads, pieces in zip(
        kv_head_ranges(num_kv_heads, mine), pieces_of(num_kv_heads, theirs, mine), strict=True
    ):
        got: list[int] = []
        for piece in pieces:
            assert piece.my_offset == len(got)
            assert piece.their_offset + piece.num_heads <= len(owners[piece.their_rank])
            start = owners[piece.their_rank][piece.their_offset]
            got += range(start, start + piece.num_heads)
        assert got == list(heads)
        assert len(ranks_read_from(pieces)) == len(pieces)


@given(st.integers(1, 64), st.integers(1, 32))
def test_equal_layouts_read_whole_blocks_of_their_own_rank(num_kv_heads: int, num_ranks: int) -> None:
    sizes = [len(heads) for heads in kv_head_ranges(num_kv_heads, num_ranks)]
    expected = [(HeadPiece(rank, 0, 0, size),) for rank, size in enumerate(sizes)]
    assert pieces_of(num_kv_heads, num_ranks, num_ranks) == expected


def test_readers_spread_over_ranks_that_hold_the_same_head() -> None:
    same = pieces_of(2, theirs=8, mine=8)
    assert [ranks_read_from(pieces) for pieces in same] == [(rank,) for rank in range(8)]
    fewer = pieces_of(1, theirs=2, mine=4)
    assert [ranks_read_from(pieces) for pieces in fewer] == [(0,), (1,), (0,), (1,)]


@pytest.mark.parametrize(("theirs", "mine"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (3, 2), (8, 3)])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 8])
def test_spans_move_every_byte_of_a_block(num_kv_heads: int, theirs: int, mine: int) -> None:
    num_layers, head_bytes = 3, 5
    whole = np.random.default_rng(0).integers(
        0, 255, (num_layers, 2, num_kv_heads, head_bytes), dtype=np.uint8
    )
    owners, readers = kv_head_ranges(num_kv_heads, theirs), kv_head_ranges(num_kv_heads, mine)
    blocks = [whole[:, :, heads.start : heads.stop].ravel() for heads in owners]
    for heads, pieces in zip(readers, pieces_of(num_kv_heads, theirs, mine), strict=True):
        expected = whole[:, :, heads.start : heads.stop].ravel()
        found = np.zeros_like(expected)
        num_bytes = 0
        for piece in pieces:
            for span in block_spans(
                piece,
                num_layers=num_layers,
                their_num_heads=len(owners[piece.their_rank]),
                my_num_heads=len(heads),
                head_bytes=head_bytes,
            ):
                source = blocks[piece.their_rank][span.their_offset : span.their_offset + span.num_bytes]
                found[span.my_offset : span.my_offset + span.num_bytes] = source
                num_bytes += span.num_bytes
        assert np.array_equal(found, expected)
        assert num_bytes == len(expected)


def test_a_rank_of_the_same_layout_takes_blocks_in_one_piece() -> None:
    spans = block_spans(
        HeadPiece(2, 0, 0, 4), num_layers=30, their_num_heads=4, my_num_heads=4, head_bytes=2048
    )
    assert spans == (Span(0, 0, 30 * 2 * 4 * 2048),)
