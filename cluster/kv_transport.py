"""Which transport moves the KV of a rank's pool, as the configuration says?"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cluster.config import ClusterConfig
from cluster.environment import NCCL_OUTLIVES_PEERS, export
from cluster.faults import with_read_faults
from kv_transfer import LoopbackNetwork, PoolMemory, agent_name, create_transport
from protocol.codec import endpoint_from_wire, endpoint_to_wire
from protocol.handoff import Span, TransportEndpoint
from protocol.ids import BlockId, WorkerIdentity
from protocol.ports import FetchHandle, KvTransport
from protocol.wire import splitserve_pb2 as pb


@dataclass(frozen=True, slots=True)
class RankAddress:
    """Which rank of which worker it is, and where other ranks and workers find it."""

    identity: WorkerIdentity
    host: str
    """Its own address, as others reach it."""
    network: LoopbackNetwork | None
    """As for `create_transport`."""
    rank: int = 0


def make_transport(
    config: ClusterConfig, mine: RankAddress, memory: PoolMemory, serial: int = 0
) -> KvTransport:
    """`serial` as for `agent_name`. Raises `StartupError`."""
    kind = config.kv_transfer.transport
    if kind == "nccl":
        export(NCCL_OUTLIVES_PEERS)
    agent = agent_name(mine.identity, rank=mine.rank, serial=serial)
    transport = create_transport(kind, memory, agent, network=mine.network, host=mine.host)
    return with_read_faults(config, transport, memory, mine.identity.worker_id, serial)


class SharedTransport:
    """The `KvTransport` of a leader, by whose endpoint all ranks are found. Owns that of its own rank."""

    def __init__(self, transport: KvTransport, others: Iterable[TransportEndpoint]) -> None:
        self._transport = transport
        self._others = tuple(others)

    @property
    def endpoint(self) -> TransportEndpoint:
        return replace(self._transport.endpoint, others=self._others)

    def connect(self, peer: TransportEndpoint, spans: Sequence[Span] | None = None) -> None:
        self._transport.connect(peer, spans)

    def disconnect(self, agent: str) -> None:
        self._transport.disconnect(agent)

    def fetch(
        self, agent: str, remote_blocks: Sequence[BlockId], local_blocks: Sequence[BlockId]
    ) -> FetchHandle:
        return self._transport.fetch(agent, remote_blocks, local_blocks)

    def close(self) -> None:
        self._transport.close()


def endpoint_to_text(endpoint: TransportEndpoint) -> str:
    return base64.b64encode(endpoint_to_wire(endpoint).SerializeToString()).decode()


def endpoint_from_text(text: str) -> TransportEndpoint:
    return endpoint_from_wire(pb.TransportEndpoint.FromString(base64.b64decode(text)))
