"""Which communicator joins the ranks of a worker?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.parallel.communicator import Communicator, SoloCommunicator
from engine.parallel.gloo import GlooCommunicator
from engine.parallel.nccl import NcclCommunicator
from engine.parallel.tcp import TcpCommunicator
from protocol.errors import StartupError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

KINDS = ("solo", "tcp", "gloo", "nccl")


def connect(
    kind: str,
    store: Store,
    rank: int,
    num_ranks: int,
    *,
    device: torch.device,
    host: str = "127.0.0.1",
    limit_s: float = 60.0,
    key: bytes = b"",
) -> Communicator:
    """This rank's place in a group for tensors on `device`; waits for the others, `limit_s` at most.

    Two groups of the same ranks need a store each, or one under two prefixes. `host` is this rank's
    address, as others reach it; by `key` ranks know each other, where the kind is tcp. Raises
    `StartupError` for an impossible kind, or one that this torch lacks, `EngineFault` when the ranks do not
    meet.
    """
    if kind not in KINDS:
        raise StartupError(f"there is no communicator {kind!r}; there are {', '.join(KINDS)}")
    if kind == "solo" or num_ranks == 1:
        if num_ranks != 1:
            raise StartupError(f"{num_ranks} ranks need a communicator: tcp on CPUs, nccl on GPUs")
        return SoloCommunicator()
    if (kind == "nccl") != (device.type == "cuda"):
        raise StartupError(f"{kind} does not reach tensors on {device.type}: tcp on CPUs, nccl on GPUs")
    if kind == "nccl":
        return NcclCommunicator(store, rank, num_ranks, device, limit_s=limit_s)
    if kind == "gloo":
        return GlooCommunicator(store, rank, num_ranks, host=host, limit_s=limit_s)
    return TcpCommunicator(store, rank, num_ranks, host=host, limit_s=limit_s, key=key)
