"""Bytes are cut into messages alike on both sides, and wishes arrive as they were sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.pairs.messages import DEVICE_CUT, HOST_CUT, Cut, Shape, messages
from kv_transfer.pairs.metadata import SECRET_BYTES, PairMetadata
from kv_transfer.pairs.wishes import blocks_from_bytes, blocks_to_bytes, shape_from_bytes, shape_to_bytes
from protocol.errors import TransferFailed
from protocol.handoff import PoolDescription
from protocol.ids import BlockId

SMALL_CUT = Cut(long_bytes=8, message_bytes=20)


def sizes(shape: Shape, blocks: list[BlockId], cut: Cut) -> list[list[int]]:
    return [[piece.num_bytes for piece in message] for message in messages(shape, blocks, cut)]


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    gaps=st.lists(st.integers(0, 5), min_size=6, max_size=6),
    numbers=st.lists(st.integers(1, 30), max_size=8, unique=True),
)
def test_both_sides_cut_alike_whatever_their_offsets(
    lengths: list[int], gaps: list[int], numbers: list[int]
) -> None:
    theirs, mine, place = [], [], 0
    for length, gap in zip(lengths, gaps, strict=False):
        mine.append((place, length))
        theirs.append((place + gap, length))
        place += length
    blocks = [BlockId(number) for number in numbers]
    owner, reader = Shape(200, tuple(reversed(theirs))), Shape(100, tuple(reversed(mine)))
    assert sizes(owner, blocks, SMALL_CUT) == sizes(reader, blocks[::-1], SMALL_CUT)
    pieces = [piece for message in messages(reader, blocks, SMALL_CUT) for piece in message]
    assert pieces == list(reader.pieces(blocks))


def test_short_pieces_are_gathered_and_long_ones_go_alone() -> None:
    shape = Shape(64, ((0, 4), (4, 7), (16, 9), (32, 6), (40, 6)))
    assert sizes(shape, [BlockId(1), BlockId(2)], SMALL_CUT) == [
        [4, 7], [9], [6, 6, 4], [7], [9], [6, 6]
    ]  # fmt: skip


def test_no_blocks_are_no_message() -> None:
    assert list(messages(Shape(8, ((0, 8),)), [], HOST_CUT)) == []


def test_on_a_device_blocks_are_gathered_however_long_they_are() -> None:
    shape = Shape(2**21, ((0, 2**21),))
    assert [len(message) for message in messages(shape, [BlockId(i) for i in range(6)], DEVICE_CUT)] == [
        4,
        2,
    ]


def test_wishes_arrive_as_they_were_sent() -> None:
    pool = PoolDescription(9, 64)
    shape = Shape(64, ((0, 4), (60, 4)))
    assert shape_from_bytes(shape_to_bytes(shape), pool) == shape
    blocks = [BlockId(i) for i in (8, 1, 8)]
    assert blocks_from_bytes(blocks_to_bytes(blocks), pool) == blocks
    assert blocks_from_bytes(b"Sother", pool) is None


@pytest.mark.parametrize("cut", [0, 5, 13, 20])
def test_a_wish_that_is_cut_off_is_refused(cut: int) -> None:
    whole = shape_to_bytes(Shape(64, ((0, 64),)))
    with pytest.raises(TransferFailed, match="wish"):
        shape_from_bytes(whole[:cut], PoolDescription(9, 64))


def test_a_request_that_is_cut_off_is_refused() -> None:
    with pytest.raises(TransferFailed, match="cut off"):
        blocks_from_bytes(blocks_to_bytes([BlockId(1)])[:-1], PoolDescription(9, 64))


def test_metadata_arrives_whole_and_keeps_its_secret_to_itself() -> None:
    metadata = PairMetadata("worker@1/rank0#0", "fe80::1", 65535, bytes(range(SECRET_BYTES)))
    assert PairMetadata.from_bytes(metadata.to_bytes()) == metadata
    assert "secret" not in repr(metadata)
