"""The only place that reads environment variables, or sets them for child processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ALLOW_FAULTS = "SPLITSERVE_ALLOW_FAULTS"


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment says, read once by the process's entry point."""

    cluster_token: str | None
    """Secret that workers and routers show each other; null: one is made for this cluster."""
    ray_token: str | None
    """Secret that opens the Ray cluster; null: Ray looks for the user's own."""
    run_dir: Path
    """Where the running servers of this user leave word of themselves."""
    allows_faults: bool = False
    """Nobody relies on the answers: what is configured may go wrong on purpose."""


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Read SPLITSERVE_CLUSTER_TOKEN, SPLITSERVE_ALLOW_FAULTS, RAY_AUTH_TOKEN and XDG_CACHE_HOME."""
    cache_home = Path(variables.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Environment(
        cluster_token=variables.get("SPLITSERVE_CLUSTER_TOKEN") or None,
        ray_token=variables.get("RAY_AUTH_TOKEN") or None,
        run_dir=cache_home / "splitserve" / "run",
        allows_faults=variables.get(ALLOW_FAULTS) == "1",
    )


UCX_PREFIX = "UCX_"
LOCAL_UCX = {"UCX_NET_DEVICES": "lo"}
"""NIXL's UCX would listen on all of the machine's networks; peers of the same machine need none."""


def ucx_variables(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What UCX is told in this process."""
    return {name: value for name, value in variables.items() if name.startswith(UCX_PREFIX)}


def local_ray_variables(ray_token: str) -> dict[str, str]:
    """What Ray and UCX must find when a local cluster starts, in the process that starts it and below.

    `ray_token` keeps the other users of this machine out of the cluster.
    """
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": ray_token,
        # Ray swaps 127.0.0.1 for the machine's own address unless it believes that it runs on a
        # Mac or on Windows, where it keeps to loopback.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # Otherwise connecting waits until Ray has started one idle worker per core.
        "RAY_prestart_worker_first_driver": "0",
        # A local GCS never comes back: what is left after a kill -9 shall not wait a minute for it.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
        # Ray starts its workers 15 nice levels down: next to anything else they would starve.
        "RAY_worker_niceness": "0",
        **LOCAL_UCX,
    }


NCCL_OUTLIVES_PEERS = {
    # A lost peer costs its group alone; by default the watchdog ends the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""For a process that reads KV by NCCL: workers come and go."""


FINDS_LOST_HOSTS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
"""For the head of a cluster of several hosts: one that is cut off is given up after about 8 s. Ray's own
values take a minute."""


def use_ray_token(home: Path | None = None) -> None:
    """Show Ray the user's token where there is one, as the commands of `ray` do on a head node.

    Ray shows it to a cluster that it finds by itself, but not to one whose address it is told. Must be
    called before `ray` is imported.
    """
    kept = (home or Path.home()) / ".ray" / "auth_token"
    if "RAY_AUTH_TOKEN" in os.environ or kept.exists():
        export({"RAY_AUTH_MODE": "token"})


def export(variables: Mapping[str, str]) -> None:
    """Set variables for this process and all that it starts. Those that are set already stay."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def forget(names: tuple[str, ...]) -> None:
    """Unset variables, so that processes started from now on do not inherit them."""
    for name in names:
        os.environ.pop(name, None)


def override(variables: Mapping[str, str]) -> None:
    """Set variables for this process and all that it starts, whatever they were."""
    os.environ.update(variables)


def with_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `variables` beside it, for a process to be started."""
    return {**os.environ, **variables}
