"""How a command finds a cluster that runs, and asks its directory who lives."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cluster.cluster_token import kept_token
from cluster.config import ClusterConfig
from cluster.environment import export, local_ray_variables, read_environment, use_ray_token
from cluster.serve_progress import public_url
from cluster.serve_state import read_state
from protocol.errors import StartupError, WorkerUnavailable
from protocol.membership import WorkerRecord

DIRECTORY_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0
SOON_TIRED = {"RAY_NUM_REDIS_GET_RETRIES": "1"}
"""Ray asks a control plane that refuses its token 20 times, for 15 s each."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """Where a running cluster is."""

    ray_address: str
    cluster_token: str | None = field(repr=False)
    """Opens its workers' gRPC servers; None: only those who started it know it."""

    @contextmanager
    def joined(self) -> Iterator[str]:
        """Connected to its Ray, whose host:port it is. Raises `WorkerUnavailable` when nothing answers."""
        check_reachable(self.ray_address)
        use_ray_token()
        export(SOON_TIRED)
        from ray.exceptions import RayError

        from cluster import launcher

        try:
            cluster = launcher.join(self.ray_address)
        except (ConnectionError, RuntimeError, RayError) as error:
            raise WorkerUnavailable(_no_answer(self.ray_address, error)) from error
        try:
            yield cluster.address
        finally:
            cluster.stop()


def find_cluster(config: ClusterConfig) -> Attachment:
    """By the file that `splitserve serve` left, or the configured Ray address.

    Must be called before `ray` is imported. Raises `StartupError` when there is no cluster to ask.
    """
    state = read_state(config)
    token = read_environment().cluster_token
    if config.ray.address is not None:
        return Attachment(config.ray.address, token or (state.cluster_token if state else kept_token()))
    if state is None:
        raise no_server(config)
    if not state.is_deployed:
        export(local_ray_variables(state.ray_token))
    return Attachment(state.ray_address, state.cluster_token)


def no_server(config: ClusterConfig) -> StartupError:
    """There is no cluster to ask."""
    return StartupError(
        f"no server answers at {public_url(config)}, and none starts there; is it another --port?"
    )


def check_reachable(ray_address: str) -> None:
    """Ray itself tries for minutes to reach a cluster that is gone. Raises `WorkerUnavailable`."""
    host, _, port = ray_address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return  # auto, or a scheme that Ray knows
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        why = error.strerror or error
        raise WorkerUnavailable(f"no Ray cluster answers at {ray_address}: {why}") from error


def _no_answer(address: str, error: Exception) -> str:
    if "auth" in f"{type(error).__name__} {error}".lower():
        return (
            f"the Ray cluster at {address} asks for a token that this user does not have: copy the head"
            " node's ~/.ray/auth_token here, or run this on the head node"
        )
    if address == "auto":
        return (
            "no Ray cluster runs on this machine that others may join (`splitserve serve` keeps its own):"
            " run this on a head node, or name one: --ray-address"
        )
    return f"no Ray cluster answers at {address}"


def list_workers() -> tuple[WorkerRecord, ...]:
    """While joined. Raises `WorkerUnavailable`."""
    from cluster.ray_directory import RayDirectory

    return asyncio.run(RayDirectory(timeout_s=DIRECTORY_TIMEOUT_S).workers())
