"""Which transport does a worker use? The one place that turns a name into an implementation."""

from __future__ import annotations

from kv_transfer.loopback import LOOPBACK, LoopbackNetwork, LoopbackTransport
from kv_transfer.memory import PoolMemory
from protocol.errors import StartupError
from protocol.ids import WorkerIdentity
from protocol.ports import KvTransport

TORCH_KINDS = frozenset({"gloo", "nccl"})
"""By torch.distributed, which is loaded for these alone."""


def agent_name(identity: WorkerIdentity, rank: int, serial: int = 0) -> str:
    """A name that no other agent has or will have.

    `serial` counts the agents that one rank has had within one incarnation.
    """
    return f"{identity}/rank{rank}#{serial}"


def create_transport(
    kind: str,
    memory: PoolMemory,
    agent: str,
    *,
    network: LoopbackNetwork | None = None,
    host: str = "127.0.0.1",
) -> KvTransport:
    """Build the transport called `kind` over `memory`; `agent` must never have been used.

    `loopback` needs the `network` that its peers are on; gloo and nccl the address of this machine, by
    which peers reach it. Raises `StartupError`, which says what to do.
    """
    if kind == "nixl":
        from kv_transfer.nixl import NixlTransport

        return NixlTransport(memory, agent)
    if kind == LOOPBACK:
        if network is None:
            raise StartupError("transport: loopback works within one process only: set transport: nixl")
        return LoopbackTransport(memory, agent, network)
    if kind in TORCH_KINDS:
        from kv_transfer.pairs import PairTransport

        return PairTransport(kind, memory, agent, host)
    raise StartupError(f"there is no transport {kind!r}: set it to nixl, gloo, nccl or loopback")
