"""Which transport does a worker use? The one place that turns a name into an implementation."""

from __future__ import annotations

from kv_transfer.loopback import LOOPBACK, LoopbackNetwork, LoopbackTransport
from kv_transfer.memory import PoolMemory
from protocol.errors import StartupError
from protocol.ids import WorkerIdentity
from protocol.ports import KvTransport


def agent_name(identity: WorkerIdentity, rank: int, serial: int = 0) -> str:
    """A name that no other agent has or will have.

    `serial` counts the agents that one rank has had within one incarnation.
    """
    return f"{identity}/rank{rank}#{serial}"


def create_transport(
    kind: str, memory: PoolMemory, agent: str, *, network: LoopbackNetwork | None = None
) -> KvTransport:
    """Build the transport called `kind` over `memory`; `agent` must never have been used.

    `loopback` needs the `network` that its peers are on. Raises `StartupError`, which says what to do.
    """
    if kind == "nixl":
        from kv_transfer.nixl import NixlTransport

        return NixlTransport(memory, agent)
    if kind == LOOPBACK:
        if network is None:
            raise StartupError("transport: loopback works within one process only: set transport: nixl")
        return LoopbackTransport(memory, agent, network)
    raise StartupError(f"there is no transport {kind!r}: set it to nixl or loopback")
