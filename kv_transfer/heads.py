"""Which KV heads does a reader's rank take from which rank of the owner? Pure: sizes in, pieces out.

    owner, 2 ranks     |0 1 2 3|4 5 6 7|
    reader, 4 ranks    |0 1|2 3|4 5|6 7|      rank 3 takes heads 6 and 7: the last two of the owner's rank 1

With fewer heads than ranks neighbouring ranks hold the same head; readers spread over those.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.rank_layout import kv_head_ranges


@dataclass(frozen=True, slots=True)
class HeadPiece:
    """Heads that are neighbours in a block of one rank of the owner and in one of one's own."""

    their_rank: int
    their_offset: int
    """The first of them among the heads of that rank."""
    my_offset: int
    num_heads: int


def head_pieces(
    num_kv_heads: int, *, their_num_ranks: int, my_rank: int, my_num_ranks: int
) -> tuple[HeadPiece, ...]:
    """What rank `my_rank` reads to have each of its heads once, in the order of its heads.

    Ranks of equal layouts read from each other alone.
    """
    theirs = kv_head_ranges(num_kv_heads, their_num_ranks)
    mine = kv_head_ranges(num_kv_heads, my_num_ranks)
    place = mine[:my_rank].count(mine[my_rank])  # among the ranks that hold the same
    pieces: list[HeadPiece] = []
    for offset, head in enumerate(mine[my_rank]):
        holders = [rank for rank, heads in enumerate(theirs) if head in heads]
        rank = holders[place % len(holders)]
        if pieces and pieces[-1].their_rank == rank:
            pieces[-1] = _longer(pieces[-1])
        else:
            pieces.append(HeadPiece(rank, theirs[rank].index(head), offset, 1))
    return tuple(pieces)


def ranks_read_from(pieces: tuple[HeadPiece, ...]) -> tuple[int, ...]:
    """The owner's ranks that must be reached, each once."""
    return tuple(dict.fromkeys(piece.their_rank for piece in pieces))


def _longer(piece: HeadPiece) -> HeadPiece:
    return HeadPiece(piece.their_rank, piece.their_offset, piece.my_offset, piece.num_heads + 1)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes that are neighbours in a block of the owner's rank and in one of one's own."""

    their_offset: int
    my_offset: int
    num_bytes: int


def block_spans(
    piece: HeadPiece, *, num_layers: int, their_num_heads: int, my_num_heads: int, head_bytes: int
) -> tuple[Span, ...]:
    """Where a piece lies in blocks `[layers, 2, heads, block_size, head_dim]` of equal size and type.

    The numbers of heads are those of the two ranks; `head_bytes` is a head's part of a layer's keys or
    values in a block. One span when the piece is all of both blocks, else one for each layer's keys and
    one for its values.
    """
    if piece.num_heads == their_num_heads == my_num_heads:
        return (Span(0, 0, 2 * num_layers * their_num_heads * head_bytes),)
    return tuple(
        Span(
            (plane * their_num_heads + piece.their_offset) * head_bytes,
            (plane * my_num_heads + piece.my_offset) * head_bytes,
            piece.num_heads * head_bytes,
        )
        for plane in range(2 * num_layers)
    )
