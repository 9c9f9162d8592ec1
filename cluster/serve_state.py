"""The file by which commands find a server of this machine that starts or runs, or what is deployed."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.environment import read_environment
from cluster.serve_progress import public_url

NOBODY = 0
"""In place of a process: what was deployed lives as long as its Ray cluster does."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """What one `splitserve serve` or `splitserve deploy` is."""

    pid: int
    """The process that ends it, or `NOBODY`."""
    url: str
    model: str
    ray_address: str
    """Empty while the server starts."""
    ray_token: str = field(repr=False)
    """Opens the local Ray cluster; the file is readable by its owner alone."""
    cluster_token: str = field(repr=False)
    """Opens the workers."""

    @property
    def is_deployed(self) -> bool:
        """It runs on somebody's Ray cluster, and no process of this machine answers for it."""
        return self.pid == NOBODY

    @property
    def is_alive(self) -> bool:
        """As far as this machine knows."""
        return self.is_deployed or Path(f"/proc/{self.pid}").exists() or not Path("/proc").exists()


def state_file(config: ClusterConfig) -> Path:
    """One per port: several servers may run at once. The same whatever their configurations say else."""
    return read_environment().run_dir / f"{config.http.port}.json"


def write_start(config: ClusterConfig) -> Path:
    """Say that a server starts; the caller removes the file when it ends. Raises `OSError`."""
    return write_state(config, "", ray_token="", cluster_token="")


def write_deployment(config: ClusterConfig, ray_address: str, cluster_token: str) -> Path:
    """Say that a Ray cluster has the application; `undeploy` removes the file. Raises `OSError`."""
    return write_state(config, ray_address, ray_token="", cluster_token=cluster_token, pid=NOBODY)


def write_state(
    config: ClusterConfig, ray_address: str, *, ray_token: str, cluster_token: str, pid: int | None = None
) -> Path:
    """Leave the file; the caller removes it when the server ends. Raises `OSError`."""
    pid = os.getpid() if pid is None else pid
    state = ServerState(pid, public_url(config), config.model_name, ray_address, ray_token, cluster_token)
    path = state_file(config)
    write_private(path, json.dumps(asdict(state)))
    return path


def write_private(path: Path, text: str) -> None:
    """For its owner alone to read; a file that was there is replaced. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def read_state(config: ClusterConfig) -> ServerState | None:
    """The server that runs on the configured port, if one left its file and still lives."""
    state = _read(config)
    return state if state and state.ray_address else None


def read_start(config: ClusterConfig) -> ServerState | None:
    """The server that starts on the configured port, and does not run yet."""
    state = _read(config)
    return None if state is None or state.ray_address else state


def _read(config: ClusterConfig) -> ServerState | None:
    try:
        state = ServerState(**json.loads(state_file(config).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return state if state.is_alive else None
