"""Ranks that talk over NVLink or a network by NCCL: tensors in GPU memory. Has not met a GPU yet."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from engine.parallel.process_group import all_gather, broadcast, gather
from protocol.errors import EngineFault, StartupError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class NcclCommunicator:
    """Implements `Communicator` for tensors on one GPU each.

    Its calls queue work on the GPU's stream and return. So a lost rank shows where the stream is waited
    for; NCCL's own watchdog ends the operation, and with it this process, after `limit_s`. Sums are taken
    in NCCL's order, which depends on the size of the message.
    """

    def __init__(
        self, store: Store, rank: int, num_ranks: int, device: torch.device, *, limit_s: float = 60.0
    ) -> None:
        """Raises `StartupError` where torch has no NCCL, `EngineFault` when the group cannot be made."""
        try:
            from torch.distributed.distributed_c10d import ProcessGroupNCCL
        except ImportError as error:
            raise StartupError(
                "this torch has no NCCL: install a CUDA build of it for ranks on GPUs"
            ) from error
        self.rank, self.num_ranks = rank, num_ranks
        self._device = device
        options: Any = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=limit_s)
        try:
            self._group: Any = ProcessGroupNCCL(store, rank, num_ranks, options)
        except RuntimeError as error:
            raise self._fault("start", error) from error

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        self._do("all_reduce", lambda group: group.allreduce([x]))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return all_gather(self._do, x, self.num_ranks)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return gather(self._do, x, self.rank, self.num_ranks)

    def broadcast(self, x: torch.Tensor) -> None:
        broadcast(self._do, x)

    def abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def close(self) -> None:
        self.abort()

    def _do(self, what: str, start: Callable[[Any], Any]) -> None:
        group = self._group
        if group is None:
            raise self._fault(what, "the group has ended")
        try:
            start(group).wait()  # the stream waits, not this thread
        except RuntimeError as error:
            raise self._fault(what, error) from error

    def _fault(self, what: str, why: object) -> EngineFault:
        return EngineFault(f"rank {self.rank} of {self.num_ranks} lost its group at {what}: {why}")
