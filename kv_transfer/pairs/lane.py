"""How do the bytes of one read go from pool to pool? A few messages at a time, in order, on both sides."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from kv_transfer.pairs.group import Pair
from kv_transfer.pairs.messages import Message

NUM_AHEAD = 16
"""Messages under way at once."""


class Lane:
    """One side of a pair, with its pool. One thread uses it. All of it raises `TransferFailed`."""

    def __init__(self, pair: Pair, pool: torch.Tensor) -> None:
        """`pool` is flat: [bytes], uint8."""
        self._pair = pair
        self._pool = pool

    def send(self, messages: Iterable[Message]) -> None:
        """Only reads the pool."""
        under_way: deque[tuple[Any, torch.Tensor]] = deque()
        for message in messages:
            if len(under_way) == NUM_AHEAD:
                self._pair.wait(under_way.popleft()[0])
            part = self._gathered(message)
            under_way.append((self._pair.send(part), part))
        while under_way:
            self._pair.wait(under_way.popleft()[0])

    def recv(self, messages: Iterable[Message], ask: Callable[[], None]) -> None:
        """`ask` the owner to send, once the first messages have a place. When this has returned or raised
        nothing writes into the pool any more: Gloo forgets a place as soon as its work is dropped."""
        under_way: deque[tuple[Any, torch.Tensor, Message]] = deque()
        rest = iter(messages)
        try:
            self._expect(rest, under_way)
            ask()
            while under_way:
                work, part, message = under_way[0]
                self._pair.wait(work)
                self._scatter(part, message)
                del work
                under_way.popleft()
                self._expect(rest, under_way)
            self._pair.settle()
        finally:
            under_way.clear()

    def _expect(self, rest: Iterator[Message], under_way: deque[tuple[Any, torch.Tensor, Message]]) -> None:
        for message in rest:
            part = self._place(message)
            under_way.append((self._pair.recv(part), part, message))
            if len(under_way) == NUM_AHEAD:
                return

    def _views(self, message: Message) -> list[torch.Tensor]:
        return [self._pool[piece.offset : piece.offset + piece.num_bytes] for piece in message]

    def _gathered(self, message: Message) -> torch.Tensor:
        views = self._views(message)
        return views[0] if len(views) == 1 else torch.cat(views)

    def _place(self, message: Message) -> torch.Tensor:
        if len(message) == 1:
            return self._views(message)[0]
        num_bytes = sum(piece.num_bytes for piece in message)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._pool.device)

    def _scatter(self, part: torch.Tensor, message: Message) -> None:
        if len(message) > 1:
            views = self._views(message)
            torch._foreach_copy_(views, torch.split(part, [piece.num_bytes for piece in message]))
