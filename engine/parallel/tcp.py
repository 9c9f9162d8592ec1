"""Ranks that talk over plain TCP, each with each: tensors in host memory, by the thread that calls.

    a rank's process dies        its connections close: the others raise at once
    a rank does not come         the others raise after `limit_s`
    `abort` from another thread  shuts the connections down: a waiting call raises at once, the others' too

A pass makes two sums per layer, each of a few KiB: what counts is how often threads change on the way.
Here it is once per message. What comes has no frame: all ranks know what is due.
"""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING, Any

import torch

from engine.parallel.mesh import meet
from protocol.errors import EngineFault

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

Pieces = dict[int, memoryview]
"""Bytes by the rank that they go to, or come from."""


class TcpCommunicator:
    """Implements `Communicator` for tensors on the CPU.

    Sums are taken in the order of ranks: a row's bits do not depend on the rows beside it, and all ranks
    get the same bits.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        *,
        host: str = "127.0.0.1",
        limit_s: float = 60.0,
        key: bytes = b"",
    ) -> None:
        """Waits for all ranks, `limit_s` at most. `host` is this rank's address, as others reach it; `key`
        is what only ranks of this group know.

        Raises `EngineFault`.
        """
        self.rank, self.num_ranks = rank, num_ranks
        self._limit_s = limit_s
        self._has_ended = False
        self._others = [other for other in range(num_ranks) if other != rank]
        try:
            self._connections = meet(store, rank, num_ranks, host=host, limit_s=limit_s, key=key)
        except (OSError, RuntimeError, ValueError) as error:
            raise self._fault("start", error) from error

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self._swap("all_reduce", x)
        total = first.to(torch.float32, copy=first is x)
        for part in others:
            total.add_(part)
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._swap("all_gather", x))

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.contiguous()
        if self.rank > 0:
            self._exchange("gather", {0: _bytes_of(x)}, {})
            return []
        everybody = [x, *(torch.empty_like(x) for _ in self._others)]
        self._exchange("gather", {}, {other: _bytes_of(everybody[other]) for other in self._others})
        return everybody

    def broadcast(self, x: torch.Tensor) -> None:
        if self.rank > 0:
            self._exchange("broadcast", {}, {0: _bytes_of(x)})
        else:
            self._exchange("broadcast", dict.fromkeys(self._others, _bytes_of(x)), {})

    def abort(self) -> None:
        self._has_ended = True
        self._connections.shut_down()

    def close(self) -> None:
        self._has_ended = True
        self._connections.close()

    def _swap(self, what: str, x: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's, in the order of ranks; `x` itself is one of them."""
        x = x.contiguous()
        everybody = [x if rank == self.rank else torch.empty_like(x) for rank in range(self.num_ranks)]
        outgoing = dict.fromkeys(self._others, _bytes_of(x))
        self._exchange(what, outgoing, {other: _bytes_of(everybody[other]) for other in self._others})
        return everybody

    def _exchange(self, what: str, to_send: Pieces, to_receive: Pieces) -> None:
        """Send and receive side by side: two ranks that have much to say do not wait for each other.

        Empties both.
        """
        if self._has_ended:
            raise self._fault(what, "the group has ended")
        deadline_s = time.monotonic() + self._limit_s
        try:
            while True:
                self._send(to_send)
                self._receive(to_receive)
                if not to_send and not to_receive:
                    return
                self._wait(to_send, to_receive, deadline_s)
        except OSError as error:
            why = "the group was aborted" if self._has_ended else error
            raise self._fault(what, why) from error

    def _send(self, pieces: Pieces) -> None:
        """As much as goes without waiting; `pieces` keeps the rest."""
        for other, piece in [*pieces.items()]:
            try:
                num_bytes = self._connections[other].send(piece) if piece else 0
            except BlockingIOError:
                continue
            _keep(pieces, other, piece[num_bytes:])

    def _receive(self, pieces: Pieces) -> None:
        """What has come; `pieces` keeps the places of the rest."""
        for other, piece in [*pieces.items()]:
            try:
                num_bytes = self._connections[other].recv_into(piece) if piece else 0
            except BlockingIOError:
                continue
            if piece and not num_bytes:
                raise ConnectionResetError(f"rank {other} has left")
            _keep(pieces, other, piece[num_bytes:])

    def _wait(self, to_send: Pieces, to_receive: Pieces, deadline_s: float) -> None:
        """Until something can be sent or has come. Raises `TimeoutError`."""
        poll = select.poll()
        for other in {*to_send, *to_receive}:
            wanted = (select.POLLOUT if other in to_send else 0) | (
                select.POLLIN if other in to_receive else 0
            )
            poll.register(self._connections[other], wanted)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            missing = ", ".join(str(other) for other in sorted({*to_send, *to_receive}))
            raise TimeoutError(f"nothing from rank {missing}")

    def _fault(self, what: str, why: object) -> EngineFault:
        self._has_ended = True
        return EngineFault(
            f"rank {self.rank} of {self.num_ranks} lost its group: {what} failed, since a rank is gone or "
            f"did not come within {self._limit_s:g} s ({why})"
        )


def _keep(pieces: Pieces, other: int, rest: memoryview) -> None:
    if rest:
        pieces[other] = rest
    else:
        del pieces[other]


def _bytes_of(x: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor. numpy knows no bfloat16."""
    array: Any = (x.view(torch.int16) if x.dtype is torch.bfloat16 else x).numpy()
    return memoryview(array).cast("B") if array.size else memoryview(b"")
