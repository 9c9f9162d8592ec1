"""The file by which `splitserve status` and others find a running server of this machine."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.serve_progress import public_url


@dataclass(frozen=True, slots=True)
class ServerState:
    """What one `splitserve serve` is."""

    pid: int
    url: str
    model: str
    ray_address: str
    ray_token: str = field(repr=False)
    """Opens the local Ray cluster; the file is readable by its owner alone."""
    cluster_token: str = field(repr=False)
    """Opens the workers."""


def state_file(config: ClusterConfig) -> Path:
    """One per port: several servers may run at once."""
    return config.cache_dir.expanduser() / "run" / f"{config.http.port}.json"


def write_state(config: ClusterConfig, ray_address: str, *, ray_token: str, cluster_token: str) -> Path:
    """Leave the file; the caller removes it when the server ends."""
    state = ServerState(
        os.getpid(), public_url(config), config.model_name, ray_address, ray_token, cluster_token
    )
    path = state_file(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(asdict(state), file)
    return path


def read_state(config: ClusterConfig) -> ServerState | None:
    """The server that runs on the configured port, if one left its file and still lives."""
    try:
        state = ServerState(**json.loads(state_file(config).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return state if Path(f"/proc/{state.pid}").exists() or not Path("/proc").exists() else None
