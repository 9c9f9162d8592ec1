"""What one process of a plain-process cluster is told when it starts. Crosses to it as a line of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.config import ClusterConfig
from protocol.ids import Role

DEFAULT_BUILD = "cluster.process_main:build_worker"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs."""

    host: str | None = None
    """Address that its gRPC listens on, and that others reach; None: that of its pool, else loopback."""
    netns: str | None = None
    """Network namespace (`ip netns`), which needs root; None: the caller's."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that it gets beside the caller's, such as UCX_TLS."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One start of one process."""

    name: str
    launch: str
    """Never used twice: by it the process says which start it came from."""
    role: Role | None
    """None: the directory."""
    config: str
    """A `ClusterConfig` as JSON."""
    token: str = field(repr=False)
    directory_address: str
    host: str
    port: int
    control_path: str
    log_path: str
    netns: str | None
    environment: Mapping[str, str]
    build: str = DEFAULT_BUILD
    """module:function that makes the worker; see `process_main.Build`."""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes | str) -> ProcessSpec:
        fields: dict[str, Any] = json.loads(line)
        role = fields.pop("role")
        return cls(**fields, role=Role(role) if role else None)

    def cluster_config(self) -> ClusterConfig:
        return ClusterConfig.model_validate_json(self.config)
