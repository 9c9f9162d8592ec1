"""Starts a Ray cluster on this machine, or joins one, and ends all that it started.

Why not `ray.init()`: it would also start the dashboard's server, the autoscaler's monitor and the log
monitor, and wait for the first of them. None has a use in a cluster of one machine, and on two cores
they cost 4 CPU seconds (of 15) and 170 MB before the first replica starts.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from cluster.config import ClusterConfig, RayConfig
from cluster.process_tree import descendants, end_processes
from protocol.errors import StartupError

LOOPBACK = "127.0.0.1"
RAY_LOGS = "/tmp/ray/session_latest/logs"  # noqa: S108


class RayCluster(Protocol):
    """A Ray cluster that this process is connected to."""

    @property
    def address(self) -> str:
        """host:port of the cluster's GCS."""

    @property
    def log_dir(self) -> str:
        """Folder of Ray's logs on this machine; those of the workers are in `serve` below it."""

    def is_alive(self) -> bool:
        """False when the cluster was lost."""

    def stop(self) -> None:
        """Disconnect, and end what this object started. Idempotent; returns within about 10 s."""


@dataclass(slots=True)
class JoinedCluster:
    """Somebody else's cluster: it runs on when we leave."""

    address: str

    @property
    def log_dir(self) -> str:
        return RAY_LOGS  # and on every other node that runs a worker

    def is_alive(self) -> bool:
        return bool(ray.is_initialized())

    def stop(self) -> None:
        ray.shutdown()


@dataclass(slots=True)
class LocalCluster:
    """A cluster of one node, all of whose processes descend from this one."""

    address: str
    _node: Any  # ray._private.node.Node

    @property
    def log_dir(self) -> str:
        return str(self._node.get_logs_dir_path())

    def is_alive(self) -> bool:
        return not self._node.dead_processes()

    def stop(self) -> None:
        processes = descendants()
        ray.shutdown()
        self._node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)
        end_processes(processes, grace_s=3.0)


def connect(config: ClusterConfig) -> RayCluster:
    """Start a local cluster, or join the configured one."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    if config.ray.address is not None:
        return join(config.ray.address)
    pools = (config.prefill, config.decode)
    resources = {name: 1e6 for pool in pools for name in pool.resources}
    # Room for all ranks of all workers, and of one successor in each pool.
    num_cpus = sum((p.most_num_workers + 1) * config.layout_of(p).num_ranks * p.num_cpus for p in pools)
    return start_local(config.ray, num_cpus, resources)


def start_local(config: RayConfig, num_cpus: float, resources: dict[str, float]) -> LocalCluster:
    """Start Ray on loopback with at least `num_cpus` in its books, and connect to it.

    `environment.local_ray_variables` must have been exported before `ray` was imported. The calling
    thread must outlive the cluster: Linux ends the daemons with the thread that started them.
    """
    try:
        node = _start_node(config, num_cpus, resources)
    except StartupError:  # Ray gives its raylet 30 s, which a busy machine may exceed
        end_processes(descendants(), grace_s=0.0)
        node = _start_node(config, num_cpus, resources)
    ray.init(address=node.gcs_address, log_to_driver=False, configure_logging=False)
    return LocalCluster(node.gcs_address, node)


def join(address: str) -> JoinedCluster:
    """Connect to a running cluster; 'auto' finds the one of this machine."""
    ray.init(address=address, log_to_driver=False, configure_logging=False)
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
    try:
        return LeanNode(params, head=True, shutdown_at_exit=False, spawn_reaper=True)
    except Exception as error:  # Ray raises just that
        raise StartupError(f"Ray did not start: {error} Its logs are in {RAY_LOGS}") from error
