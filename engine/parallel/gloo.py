"""Ranks that talk over TCP by Gloo: tensors in host memory, on any machine.

    a rank's process dies        its connections close: the others raise at once
    a rank does not come         the others raise after `limit_s`
    `abort` from another thread  a waiting call looks up every `_LOOK_UP`, and raises

No use is made of torch.distributed's global group: several groups can live in one process, in tests as
threads.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from engine.parallel.process_group import all_gather, broadcast, gather
from protocol.errors import EngineFault

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_LOOK_UP = timedelta(seconds=0.25)


class GlooCommunicator:
    """Implements `Communicator` for tensors on the CPU.

    Sums are taken in the order of ranks: a row's bits do not depend on the rows beside it, as they would
    with Gloo's own reduction, which starts at another rank for each part of the message. All ranks get
    the same bits.
    """

    def __init__(
        self, store: Store, rank: int, num_ranks: int, *, host: str = "127.0.0.1", limit_s: float = 60.0
    ) -> None:
        """Waits for all ranks, `limit_s` at most. `host` is this rank's address, as others reach it.

        Raises `EngineFault`.
        """
        from torch.distributed import distributed_c10d

        self.rank, self.num_ranks = rank, num_ranks
        self._limit_s = limit_s
        self._is_aborted = False
        gloo: Any = distributed_c10d.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=limit_s)
        options._threads = 1  # one operation at a time, as the callers have it
        options._devices = [gloo.create_device(hostname=host)]
        try:
            self._group = gloo(store, rank, num_ranks, options)
        except RuntimeError as error:
            raise self._fault("start", error) from error

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.all_gather(x)
        wide = parts if parts.dtype is torch.float32 else parts.float()
        total = wide[0]
        for part in wide[1:]:
            total = total.add_(part)
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return all_gather(self._do, x, self.num_ranks)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return gather(self._do, x, self.rank, self.num_ranks)

    def broadcast(self, x: torch.Tensor) -> None:
        broadcast(self._do, x)

    def abort(self) -> None:
        self._is_aborted = True

    def close(self) -> None:
        self._is_aborted = True
        group, self._group = self._group, None
        if group is not None:
            # Closes the connections. The rest goes with the last reference, which waits for what was under
            # way when the group was aborted: for `limit_s` at most.
            group.abort()

    def _do(self, what: str, start: Callable[[Any], Any]) -> None:
        if self._is_aborted:
            raise self._fault(what, "the group has ended")
        try:
            work = start(self._group)
            self._wait(work)
        except RuntimeError as error:
            raise self._fault(what, error) from error

    def _wait(self, work: Any) -> None:
        """Bounded by the group's own limit, after which the operation has failed."""
        while not self._is_aborted:
            try:
                work.wait(_LOOK_UP)
            except RuntimeError:
                if work.is_completed():
                    break
            else:
                return
        if not work.is_completed():
            raise RuntimeError("the group was aborted")
        work.wait()  # says how it ended

    def _fault(self, what: str, why: object) -> EngineFault:
        self._is_aborted = True
        return EngineFault(
            f"rank {self.rank} of {self.num_ranks} lost its group: {what} failed, since a rank is gone or "
            f"did not come within {self._limit_s:g} s ({why})"
        )
