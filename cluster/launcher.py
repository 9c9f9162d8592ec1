"""Starts a Ray cluster on this machine, or joins one, and ends all that it started.

Why not `ray.init()`: it would also start the dashboard's server, the autoscaler's monitor and the log
monitor, and wait for the first of them. None has a use in a cluster of one machine, and on two cores
they cost 4 CPU seconds (of 15) and 170 MB before the first replica starts.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import psutil
import ray

from cluster.config import ClusterConfig, RayConfig

LOOPBACK = "127.0.0.1"


class RayCluster(Protocol):
    """A Ray cluster that this process is connected to."""

    @property
    def address(self) -> str:
        """host:port of the cluster's GCS."""

    def is_alive(self) -> bool:
        """False when the cluster was lost."""

    def stop(self) -> None:
        """Disconnect, and end what this object started. Idempotent; returns within about 10 s."""


@dataclass(slots=True)
class JoinedCluster:
    """Somebody else's cluster: it runs on when we leave."""

    address: str

    def is_alive(self) -> bool:
        return bool(ray.is_initialized())

    def stop(self) -> None:
        ray.shutdown()


@dataclass(slots=True)
class LocalCluster:
    """A cluster of one node, all of whose processes descend from this one."""

    address: str
    _node: Any  # ray._private.node.Node

    def is_alive(self) -> bool:
        return not self._node.dead_processes()

    def stop(self) -> None:
        processes = descendants()
        ray.shutdown()
        self._node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)
        end_processes(processes, grace_s=3.0)


def connect(config: ClusterConfig) -> RayCluster:
    """Start a local cluster, or join the configured one."""
    if config.ray.address is not None:
        return join(config.ray.address)
    pools = (config.prefill, config.decode)
    resources = {name: 1e6 for pool in pools for name in pool.resources}
    return start_local(config.ray, sum(p.num_workers * p.num_cpus for p in pools), resources)


def start_local(config: RayConfig, num_cpus: float, resources: dict[str, float]) -> LocalCluster:
    """Start Ray on loopback with at least `num_cpus` in its books, and connect to it.

    `environment.local_ray_variables` must have been exported before `ray` was imported. Must run on
    the main thread: Linux ends the daemons when the thread that started them ends.
    """
    node = _start_node(config, num_cpus, resources)
    ray.init(
        address=node.gcs_address,
        log_to_driver=False,
        configure_logging=False,
        logging_level=logging.ERROR,
    )
    return LocalCluster(node.gcs_address, node)


def join(address: str) -> JoinedCluster:
    """Connect to a running cluster; 'auto' finds the one of this machine."""
    ray.init(address=address, log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
    return JoinedCluster(ray.get_runtime_context().gcs_address)


def _start_node(config: RayConfig, num_cpus: float, resources: dict[str, float]) -> Any:
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class LeanNode(Node):
        """A head node without the dashboard's server."""

        def start_api_server(self, **_: object) -> None:
            self._webui_url = ""

    params = RayParams(
        node_ip_address=LOOPBACK,
        num_cpus=max(os.cpu_count() or 1, math.ceil(num_cpus)),
        resources=resources,
        object_store_memory=config.object_store_bytes,
        no_monitor=True,
        include_log_monitor=False,  # type: ignore[arg-type]  # Ray's annotation is wrong
        include_dashboard=False,
        dashboard_agent_listen_port=0,
        min_worker_port=0,
        max_worker_port=0,
    )
    return LeanNode(params, head=True, shutdown_at_exit=True, spawn_reaper=True)


def descendants() -> list[psutil.Process]:
    """All processes that descend from this one."""
    processes: list[psutil.Process] = psutil.Process().children(recursive=True)
    return processes


def end_processes(processes: Iterable[psutil.Process], grace_s: float) -> None:
    """Wait `grace_s` for processes to end by themselves, then kill the rest. Safe against pid reuse."""
    deadline = time.monotonic() + grace_s
    _, alive = psutil.wait_procs(list(processes), timeout=max(0.0, deadline - time.monotonic()))
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=2.0)
