"""What a follower is told when it starts: one rank of a worker that is not its leader."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.config import ClusterConfig
from protocol.ids import Role, WorkerIdentity


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Crosses to another process as a line of JSON."""

    role: Role
    rank: int
    """From 1 on."""
    config: str
    """A `ClusterConfig` as JSON."""
    token: str = field(repr=False)
    """Opens the gRPC servers of the cluster."""
    identity: WorkerIdentity
    """The worker's, of which this is one rank."""
    store_address: str
    """host:port at which the leader waits."""
    host: str
    """This rank's own address, as the others reach it."""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes | str) -> RankSpec:
        fields: dict[str, Any] = json.loads(line)
        identity = WorkerIdentity(**fields.pop("identity"))
        return cls(role=Role(fields.pop("role")), identity=identity, **fields)

    def cluster_config(self) -> ClusterConfig:
        return ClusterConfig.model_validate_json(self.config)
