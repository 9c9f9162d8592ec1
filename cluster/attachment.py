"""How a command finds a cluster that runs, and asks its directory who lives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cluster.config import ClusterConfig
from cluster.environment import export, local_ray_variables, read_environment
from cluster.serve_progress import public_url
from cluster.serve_state import read_state
from protocol.errors import StartupError, WorkerUnavailable
from protocol.membership import WorkerRecord

DIRECTORY_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Attachment:
    """Where a running cluster is."""

    ray_address: str
    cluster_token: str | None = field(repr=False)
    """Opens its workers' gRPC servers; None: only those who started it know it."""

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Connected to its Ray. Raises `WorkerUnavailable` when nothing answers there."""
        from cluster import launcher

        try:
            cluster = launcher.join(self.ray_address)
        except (ConnectionError, RuntimeError) as error:
            raise WorkerUnavailable(f"no Ray cluster answers at {self.ray_address}") from error
        try:
            yield
        finally:
            cluster.stop()


def find_cluster(config: ClusterConfig) -> Attachment:
    """By the file that `splitserve serve` left, or the configured Ray address.

    Must be called before `ray` is imported. Raises `StartupError` when there is no cluster to ask.
    """
    state = read_state(config)
    token = read_environment().cluster_token
    if config.ray.address is not None:
        return Attachment(config.ray.address, token or (state.cluster_token if state else None))
    if state is None:
        raise StartupError(
            f"no server answers at {public_url(config)}, and none starts there; is it another --port?"
        )
    export(local_ray_variables(state.ray_token))
    return Attachment(state.ray_address, state.cluster_token)


def list_workers() -> tuple[WorkerRecord, ...]:
    """While joined. Raises `WorkerUnavailable`."""
    from cluster.ray_directory import RayDirectory

    return asyncio.run(RayDirectory(timeout_s=DIRECTORY_TIMEOUT_S).workers())
