"""What is asked of a node: facts, and one side of a timed read. Every probe has its time limit."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from cluster.background import Background
from cluster.config import ClusterConfig
from cluster.doctor.clock import probe_clock
from cluster.doctor.facts import NodeFacts
from cluster.doctor.gpus import probe_gpus
from cluster.doctor.limits import probe_limits
from cluster.doctor.memory import probe_memory
from cluster.doctor.model import probe_model
from cluster.doctor.ports import probe_http_port
from cluster.doctor.rdma import probe_rdma
from cluster.doctor.read_plan import ReadPlan
from cluster.doctor.read_process import Measured, OwnerProcess, read_from
from cluster.doctor.shm import probe_shm
from cluster.doctor.ucx import probe_ucx
from cluster.doctor.versions import probe_versions
from cluster.environment import LOCAL_UCX, ucx_variables
from protocol.ports import Clock

PROBE_LIMIT_S = 20.0
"""Beyond it a probe is given up; the others go on."""

Probes = Mapping[str, Callable[[], Any]]
"""By the field of `NodeFacts` that it fills."""


class Node(Protocol):
    """A node of the cluster, here or elsewhere. All calls are bounded in time."""

    @property
    def name(self) -> str: ...

    def examine(self) -> NodeFacts:
        """Raises `WorkerUnavailable` when the node does not answer."""

    def own_blocks(self, plan: ReadPlan) -> str:
        """Start a process that owns blocks; returns what a reader needs. Raises `SplitserveError`."""

    def read_blocks(self, endpoint: str, plan: ReadPlan) -> Measured:
        """Read them in another process. Raises `SplitserveError`."""

    def stop(self) -> None:
        """End what was started there. Idempotent."""


class ThisNode:
    """The machine that this process runs on."""

    def __init__(
        self,
        name: str,
        config: ClusterConfig,
        probes: Probes | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`probes`: in the place of all real ones; `variables`: for the processes that read."""
        self.name = name
        self._probes = probes_of(config) if probes is None else probes
        self._variables = variables_of(config) if variables is None else variables
        self._owner: OwnerProcess | None = None

    def examine(self) -> NodeFacts:
        return run_probes(self.name, self._probes)

    def own_blocks(self, plan: ReadPlan) -> str:
        self.stop()
        self._owner = OwnerProcess(plan, self._variables)
        return self._owner.endpoint

    def read_blocks(self, endpoint: str, plan: ReadPlan) -> Measured:
        return read_from(endpoint, plan, self._variables)

    def stop(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.stop()


def this_machine(config: ClusterConfig) -> ThisNode:
    return ThisNode(platform.node() or "this machine", config)


def probes_of(config: ClusterConfig) -> Probes:
    """Every probe. A new one is added here, and its check in `doctor.CHECKS`."""
    return {
        "versions": probe_versions,
        "gpus": probe_gpus,
        "rdma": probe_rdma,
        "ucx": probe_ucx,
        "shm": probe_shm,
        "limits": probe_limits,
        "memory": probe_memory,
        "model": partial(probe_model, config),
        "http_port_problem": partial(probe_http_port, config),
        "clock": probe_clock,
    }


def variables_of(config: ClusterConfig) -> dict[str, str]:
    """What workers of this configuration find in their environment beside what is there already."""
    told = ucx_variables()
    local = LOCAL_UCX if config.ray.address is None else {}
    return {name: value for name, value in local.items() if name not in told}


def run_probes(
    name: str, probes: Probes, limit_s: float = PROBE_LIMIT_S, clock: Clock = time.monotonic
) -> NodeFacts:
    """All at once; one that fails, or does not end, leaves its reason in the place of its fact.

    The limit is that of all of them together: a node where several hang answers in time, too.
    """
    until_s = clock() + limit_s
    running = {field: Background(f"doctor: {field}", probe) for field, probe in probes.items()}
    found: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for field, probe in running.items():
        if not probe.wait(max(0.0, until_s - clock())):
            failures[field] = f"no answer within {limit_s:.0f} s"
            continue
        try:
            found[field] = probe.result()
        except Exception as error:  # whatever a broken system raises is what the doctor is there to tell
            failures[field] = f"{type(error).__name__}: {error}"
    return NodeFacts(name=name, failures=failures, **found)
