"""Which bytes of the blocks go into one message? Both sides find the same answer, each for its own pool.

A long piece goes by itself, from its place and to its place. Short ones are gathered: a message has its
own price, and over loopback TCP 32 KiB take about as long as that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from protocol.ids import BlockId


@dataclass(frozen=True, slots=True)
class Cut:
    """How blocks are cut into messages."""

    long_bytes: int
    """From here on a piece goes by itself."""
    message_bytes: int
    """Of gathered pieces, at most."""


HOST_CUT = Cut(long_bytes=2**15, message_bytes=2**20)
DEVICE_CUT = Cut(long_bytes=2**62, message_bytes=2**23)
"""On a GPU each message takes some calls of the driver, and copies cost next to nothing."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one block, by their offset in one side's pool."""

    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What a read moves of each block of one side: (offset in the block, number of bytes), in order."""

    block_bytes: int
    spans: tuple[tuple[int, int], ...]

    def pieces(self, blocks: Sequence[BlockId]) -> Iterator[Piece]:
        for block in blocks:
            start = block * self.block_bytes
            for offset, num_bytes in self.spans:
                yield Piece(start + offset, num_bytes)


Message = tuple[Piece, ...]


def messages(shape: Shape, blocks: Sequence[BlockId], cut: Cut) -> Iterator[Message]:
    """In the order in which they go. Depends on sizes alone: both sides cut alike."""
    gathered: list[Piece] = []
    num_bytes = 0
    for piece in shape.pieces(blocks):
        is_long = piece.num_bytes >= cut.long_bytes
        if gathered and (is_long or num_bytes + piece.num_bytes > cut.message_bytes):
            yield tuple(gathered)
            gathered, num_bytes = [], 0
        if is_long:
            yield (piece,)
        else:
            gathered.append(piece)
            num_bytes += piece.num_bytes
    if gathered:
        yield tuple(gathered)
