"""Which bytes of every block does a connection move? Spans, in as few pieces as possible. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from protocol.handoff import Span

Spans = tuple[Span, ...]
"""In the order of one's own block, without overlap there; no two of them are neighbours on both sides."""


def whole_block(block_bytes: int) -> Spans:
    return (Span(0, 0, block_bytes),)


def span_bytes(spans: Sequence[Span]) -> int:
    """What a read of one block moves."""
    return sum(span.num_bytes for span in spans)


def place_of_byte(index: int, spans: Sequence[Span]) -> int:
    """Where in one's own block the `index`-th byte of a read of it lies."""
    for span in spans:
        if index < span.num_bytes:
            return span.my_offset + index
        index -= span.num_bytes
    raise IndexError(f"a read of {span_bytes(spans)} bytes has no byte {index} beyond its last")


def merged(spans: Iterable[Span]) -> Spans:
    """The same bytes in as few spans as possible."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: span.my_offset):
        if joined and _are_neighbours(joined[-1], span):
            joined[-1] = replace(joined[-1], num_bytes=joined[-1].num_bytes + span.num_bytes)
        else:
            joined.append(span)
    return tuple(joined)


def check_spans(spans: Spans, *, their_block_bytes: int, my_block_bytes: int) -> None:
    """Raise `ValueError` unless merged spans lie within both blocks, and no byte of one's own gets two."""
    if not spans:
        raise ValueError("there are none")
    written_to = 0
    for span in spans:
        if span.num_bytes < 1 or span.their_offset < 0 or span.my_offset < 0:
            raise ValueError(f"{span} holds nothing, or begins before the block")
        if span.my_offset < written_to:
            raise ValueError(f"{span} overlaps the one before it")
        written_to = span.my_offset + span.num_bytes
        if written_to > my_block_bytes:
            raise ValueError(f"{span} goes beyond a block of {my_block_bytes} bytes here")
        if span.their_offset + span.num_bytes > their_block_bytes:
            raise ValueError(f"{span} goes beyond a block of {their_block_bytes} bytes there")


def _are_neighbours(first: Span, second: Span) -> bool:
    return (
        first.my_offset + first.num_bytes == second.my_offset
        and first.their_offset + first.num_bytes == second.their_offset
    )
