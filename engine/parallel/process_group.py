"""What do ranks do through a process group of torch.distributed? The same calls, by Gloo and by NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Do = Callable[[str, Callable[[Any], Any]], None]
"""Has the group do something, which has a name for errors, and waits for it. Raises `EngineFault`."""

LEADER = 0


def all_gather(do: Do, x: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """As `Communicator.all_gather`."""
    x = x.contiguous()
    everybody = torch.empty(num_ranks * x.numel(), dtype=x.dtype, device=x.device)
    do("all_gather", lambda group: group._allgather_base(everybody, x.view(-1)))
    return everybody.view(num_ranks, *x.shape)


def gather(do: Do, x: torch.Tensor, rank: int, num_ranks: int) -> list[torch.Tensor]:
    """As `Communicator.gather`."""
    from torch.distributed.distributed_c10d import GatherOptions

    options = GatherOptions()
    options.rootRank = LEADER
    x = x.contiguous()
    everybody = [torch.empty_like(x) for _ in range(num_ranks)] if rank == LEADER else []
    outputs = [everybody] if everybody else []
    do("gather", lambda group: group.gather(outputs, [x], options))
    return everybody


def broadcast(do: Do, x: torch.Tensor) -> None:
    """As `Communicator.broadcast`."""
    from torch.distributed.distributed_c10d import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank = LEADER
    do("broadcast", lambda group: group.broadcast([x], options))
