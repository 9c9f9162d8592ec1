"""Ranks that talk over NVLink or a network by NCCL: tensors in GPU memory. Has not met a GPU yet."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from protocol.errors import EngineFault

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
        """Raises `EngineFault`, where torch has no NCCL too."""
        try:
            from torch.distributed.distributed_c10d import ProcessGroupNCCL
        except ImportError as error:
            raise EngineFault("this torch has no NCCL: ranks on GPUs need a CUDA build of torch") from error
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
        x = x.contiguous()
        everybody = torch.empty(self.num_ranks * x.numel(), dtype=x.dtype, device=x.device)
        self._do("all_gather", lambda group: group._allgather_base(everybody, x.view(-1)))
        return everybody.view(self.num_ranks, *x.shape)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        from torch.distributed.distributed_c10d import GatherOptions

        options = GatherOptions()
        options.rootRank = 0
        x = x.contiguous()
        everybody = [torch.empty_like(x) for _ in range(self.num_ranks)] if self.rank == 0 else []
        outputs = [everybody] if everybody else []
        self._do("gather", lambda group: group.gather(outputs, [x], options))
        return everybody

    def broadcast(self, x: torch.Tensor) -> None:
        from torch.distributed.distributed_c10d import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        self._do("broadcast", lambda group: group.broadcast([x], options))

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
