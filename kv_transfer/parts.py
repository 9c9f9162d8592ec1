"""What does a reader's rank take from which rank of the owner? Pure: layouts in, spans of blocks out.

                     heads 0 1 2 3                                heads 0 1   2 3
    owner,  layer 0       |rank 0 |          reader,    layer 0       | r0  | r1  |
    stages  layer 1       |rank 0 |          2 ranks    layer 1       | r0  | r1  |
            layer 2       |rank 1 |          a stage    layer 2       | r0  | r1  |

Rank 1 takes heads 2 and 3 of layers 0 and 1 from the owner's rank 0, and of layer 2 from its rank 1. With
fewer heads than ranks neighbouring ranks hold the same head; readers spread over those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kv_transfer.spans import Spans, merged
from protocol.handoff import Span
from protocol.rank_layout import KvPart, RankLayout, kv_parts


@dataclass(frozen=True, slots=True)
class RankRead:
    """What is read from one rank of the owner."""

    rank: int
    spans: Spans
    """Of blocks `[layers, 2, heads, block_size, head_dim]` with the layers and heads of either rank."""


def rank_reads(
    num_layers: int,
    num_kv_heads: int,
    *,
    theirs: RankLayout,
    mine: RankLayout,
    my_rank: int,
    head_bytes: int,
) -> tuple[RankRead, ...]:
    """What rank `my_rank` reads to have every byte of its blocks once, in the order of the owner's ranks.

    `head_bytes` is one head's part of one layer's keys, or values, in a block; both sides' blocks have as
    many tokens and the same number type. Ranks of equal layouts read whole blocks, from each other alone.
    """
    owners = kv_parts(num_layers, num_kv_heads, theirs)
    readers = kv_parts(num_layers, num_kv_heads, mine)
    me = readers[my_rank]
    turn = readers[:my_rank].count(me)  # among the ranks that hold the same
    spans: dict[int, list[Span]] = {}
    for layer in me.layers:
        for head in me.heads:
            holders = [rank for rank, part in enumerate(owners) if _holds(part, layer, head)]
            rank = holders[turn % len(holders)]
            spans.setdefault(rank, []).extend(_row_spans(layer, head, owners[rank], me, head_bytes))
    return tuple(RankRead(rank, merged(spans[rank])) for rank in sorted(spans))


def num_rows(part: KvPart) -> int:
    """Rows of a rank's block: one for each (layer, K or V, head)."""
    return 2 * len(part.layers) * len(part.heads)


def _holds(part: KvPart, layer: int, head: int) -> bool:
    return layer in part.layers and head in part.heads


def _row_spans(layer: int, head: int, theirs: KvPart, mine: KvPart, head_bytes: int) -> Iterator[Span]:
    """One head's keys and values of one layer."""
    for keys_or_values in range(2):
        their_row, my_row = (_row(part, layer, keys_or_values, head) for part in (theirs, mine))
        yield Span(their_row * head_bytes, my_row * head_bytes, head_bytes)


def _row(part: KvPart, layer: int, keys_or_values: int, head: int) -> int:
    plane = 2 * part.layers.index(layer) + keys_or_values
    return plane * len(part.heads) + part.heads.index(head)
