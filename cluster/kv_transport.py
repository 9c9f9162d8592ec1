"""Which transport moves the KV of a rank's pool, as the configuration says?"""

from __future__ import annotations

from cluster.config import ClusterConfig
from cluster.faults import with_read_faults
from kv_transfer import LoopbackNetwork, PoolMemory, agent_name, create_transport
from protocol.ids import WorkerIdentity
from protocol.ports import KvTransport


def make_transport(
    config: ClusterConfig,
    identity: WorkerIdentity,
    network: LoopbackNetwork | None,
    memory: PoolMemory,
    serial: int = 0,
    *,
    rank: int = 0,
) -> KvTransport:
    """`network` as for `create_transport`; `serial` as for `agent_name`. Raises `StartupError`."""
    agent = agent_name(identity, rank=rank, serial=serial)
    transport = create_transport(config.kv_transfer.transport, memory, agent, network=network)
    return with_read_faults(config, transport, memory, identity.worker_id, serial)
