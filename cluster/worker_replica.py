"""A worker of either role as a Ray Serve replica: Serve starts, watches and replaces it.

No request passes through Serve: routers, and decode workers those of prefill, reach the worker by its
own gRPC server, whose address they learn from the directory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Protocol

import ray
from ray import serve

from protocol.signals import StageSignals


class Worker(Protocol):
    """What Serve needs of a worker."""

    async def start(self, host: str, port: int) -> str:
        """Load, listen, announce; returns host:port. Raises `StartupError`."""

    async def stop(self, grace_s: float) -> None:
        """Take no new work, let what runs end for up to `grace_s`, fail the rest, and free everything."""

    def check_health(self) -> None:
        """Raise when the worker must be replaced."""

    def signals(self) -> StageSignals:
        """How hard it is pressed."""


class WorkerReplica:
    """One replica; `build` makes the worker from the replica's own name, which no other ever has."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, build: Callable[[str], Worker], host: str, drain_limit_s: float
    ) -> None:
        self._drain_limit_s = drain_limit_s
        self._worker = build(serve.get_replica_context().replica_id.unique_id)
        await self._worker.start(own_address(host), 0)

    def check_health(self) -> None:
        """Called by Serve every period; three failures in a row and the replica is replaced."""
        self._worker.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve every second where the pool follows its load: see `cluster.scaling`."""
        return asdict(self._worker.signals())

    async def __del__(self) -> None:
        """Serve's farewell before a graceful end: a rolling update, a scale-down, or the end of all.

        At the end of all the routers end their requests, and so this wait, too.
        """
        if hasattr(self, "_worker"):
            await self._worker.stop(self._drain_limit_s)


def own_address(host: str) -> str:
    """A pool's `host`; for auto the address by which other nodes reach this one."""
    if host != "auto":
        return host
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
