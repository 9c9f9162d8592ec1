"""`splitserve status`: what the running cluster says about itself."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from cluster.attachment import find_cluster, list_workers, no_server
from cluster.config import ClusterConfig
from cluster.serve_port import http_answers
from cluster.serve_progress import public_url
from cluster.serve_state import read_start, read_state
from protocol.ids import Role
from protocol.membership import WorkerRecord


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """One look at a cluster."""

    url: str
    alive: bool
    """The router answers."""
    ready: bool
    """A hand-off succeeded recently."""
    workers: tuple[WorkerRecord, ...]
    note: str | None = None
    """Why this is not all: the server starts yet, or its workers cannot be asked."""


def look(config: ClusterConfig) -> ClusterStatus:
    """Ask the router over HTTP and the directory over Ray.

    Raises `StartupError` when there is no cluster to ask, and `WorkerUnavailable` when it does not answer.
    """
    url = public_url(config)
    alive, ready = http_answers(url, "/health"), http_answers(url, "/ready")
    if config.ray.address is None and read_state(config) is None:
        return _without_ray(config, url, alive=alive, ready=ready)
    with find_cluster(config).joined():
        return ClusterStatus(url, alive, ready, list_workers())


def _without_ray(config: ClusterConfig, url: str, *, alive: bool, ready: bool) -> ClusterStatus:
    start = read_start(config)
    if start is not None:
        note = f"{start.model} is starting (pid {start.pid}); its own output says how far it is"
        return ClusterStatus(url, alive, ready, (), note)
    if alive:
        note = "started by somebody else or elsewhere: --ray-address lists its workers"
        return ClusterStatus(url, alive, ready, (), note)
    raise no_server(config)


def as_json(status: ClusterStatus) -> str:
    return json.dumps(asdict(status) | {"num_workers": len(status.workers)}, indent=2)


def as_table(status: ClusterStatus) -> str:
    """Two lines about the service and one per worker."""
    health = "ready" if status.ready else "alive, not ready" if status.alive else "does not answer"
    if status.note is not None:
        return f"{status.url}  {health}\n{status.note}"
    lines = [f"{status.url}  {health}", ""]
    rows: list[tuple[str, ...]] = [
        ("role", "worker", "address", "running", "waiting", "held", "blocks free", "dtype", "ops")
    ]
    rows += [_row(record) for record in status.workers]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines += [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows
    ]
    missing = [role.value for role in Role if not any(r.role is role for r in status.workers)]
    lines += [f"no {role} worker lives" for role in missing]
    return "\n".join(line.rstrip() for line in lines)


def _row(record: WorkerRecord) -> tuple[str, ...]:
    load = record.load
    return (
        record.role.value + (" (draining)" if record.draining else ""),
        str(record.identity),
        record.address,
        str(load.num_running),
        str(load.num_waiting),
        str(load.num_held),
        f"{load.blocks_free} of {load.blocks_total}",
        record.fingerprint.dtype,
        record.ops or "-",
    )
