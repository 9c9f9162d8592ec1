"""What is known of the nodes, the running cluster and the reads between them? Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.config import ClusterConfig
from protocol.errors import SplitserveError
from protocol.membership import WorkerRecord

NODE = "node"
"""Stands for all probes of a node that does not answer."""


@dataclass(frozen=True, slots=True)
class Versions:
    """What is installed."""

    python: str
    packages: Mapping[str, str]
    """Version by name; what is not installed is left out."""
    torch_cuda: str | None = None
    """The CUDA that torch was built for; None: a build for CPUs, or no torch."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as its driver sees it."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of a node; all empty where there is no NVIDIA driver."""

    driver: str = ""
    cuda: str = ""
    """The newest CUDA that the driver can run."""
    devices: tuple[Gpu, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    """By pair such as `0-1`: how they are joined, as nvidia-smi says: NV18 is NVLink, SYS the long way."""


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA device."""

    name: str
    """As in UCX_NET_DEVICES: device:port."""
    state: str
    rate: str
    link_layer: str
    gid_types: tuple[str, ...]
    """Kinds of its GIDs that are set, such as `RoCE v2`."""

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"


@dataclass(frozen=True, slots=True)
class Rdma:
    """The RDMA devices of a node."""

    ports: tuple[RdmaPort, ...] = ()
    verbs_usable: bool = True
    """This process may open /dev/infiniband/uverbs*."""

    @property
    def is_active(self) -> bool:
        return any(port.is_active for port in self.ports)


@dataclass(frozen=True, slots=True)
class Ucx:
    """What UCX is told, and what it can choose from."""

    variables: Mapping[str, str]
    interfaces: tuple[str, ...]
    """Network interfaces."""


@dataclass(frozen=True, slots=True)
class Shm:
    """The file system of shared memory."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Soft limits of a process; None: unlimited."""

    memlock_bytes: int | None
    nofile: int | None
    nofile_hard: int | None


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory, within the container's limit where there is one."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Model:
    """The configured model as a node sees it."""

    path: str = ""
    state: str = ""
    """ready, to convert, to download."""
    revision: str = ""
    num_parameters: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    """config.json; empty where it is not known yet."""
    problem: str = ""
    """What is wrong with it, and what to do; all else may be empty then."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The wall clock when the node was asked."""

    unix_s: float
    skew_s: float = 0.0
    """Ahead of the machine that asks, give or take half of `round_trip_s`."""
    round_trip_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node. What could not be found out is None, with the reason in `failures`."""

    name: str
    versions: Versions | None = None
    gpus: Gpus | None = None
    rdma: Rdma | None = None
    ucx: Ucx | None = None
    shm: Shm | None = None
    limits: Limits | None = None
    memory: Memory | None = None
    model: Model | None = None
    http_port_problem: str | None = None
    """Why the HTTP port cannot be listened on; None when it can."""
    clock: Clock | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    """As Ray counts them; empty on a node that is not in a Ray cluster."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """By probe: why it found nothing out."""


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """What a worker in the directory said when it was asked itself."""

    record: WorkerRecord
    """The directory's word."""
    answer: WorkerRecord | None
    error: SplitserveError | None = None


@dataclass(frozen=True, slots=True)
class Service:
    """What the router says over HTTP."""

    url: str
    is_alive: bool
    is_ready: bool


@dataclass(frozen=True, slots=True)
class Live:
    """The cluster as it runs."""

    address: str = ""
    """Of its Ray; empty when none runs."""
    workers: tuple[WorkerAnswer, ...] = ()
    lost_nodes: tuple[str, ...] = ()
    """Nodes that Ray knew, and that do not answer it any more."""
    service: Service | None = None
    is_starting: bool = False
    problem: str = ""
    """Why the rest is not known."""
    knows_token: bool = True


@dataclass(frozen=True, slots=True)
class BlockRead:
    """One timed read from a node's memory into another's (or its own), by two fresh processes."""

    owner: str
    reader: str
    num_blocks: int = 0
    block_bytes: int = 0
    first_s: float = 0.0
    """The first read, with the connection that it makes."""
    seconds: float = 0.0
    """The median of the later ones."""
    transport: str = ""
    """What UCX chose, such as `cma/memory` or `rc_mlx5/mlx5_0:1`; empty when it did not say."""
    ucx_version: str = ""
    error: str = ""
    """Why there was no read; what was measured means nothing then."""

    @property
    def bytes_per_s(self) -> float:
        return self.num_blocks * self.block_bytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """All that the checks look at."""

    config: ClusterConfig
    nodes: tuple[NodeFacts, ...]
    live: Live = Live()
    reads: tuple[BlockRead, ...] = ()

    @property
    def is_one_machine(self) -> bool:
        """`splitserve serve` starts everything where the doctor is."""
        return self.config.ray.address is None

    @property
    def is_running(self) -> bool:
        return bool(self.live.workers) or self.live.is_starting
