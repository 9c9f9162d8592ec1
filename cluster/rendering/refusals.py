"""What could never work on other hosts, or in pods, and would only show there, as something that waits?"""

from __future__ import annotations

from pathlib import PurePath

from cluster.config import ClusterConfig
from cluster.rendering.clustered import is_loopback, pool_resources
from cluster.rendering.kuberay_pods import HEAD_PORTS, METRICS_PORT
from protocol.errors import StartupError
from protocol.ids import Role

RAYS_OWN = "node:"
"""Resources that Ray gives to nodes by itself."""
FIRST_FREE_PORT = 1024
"""Below it only root may listen, on most hosts."""
PROXY_PORTS = {"HAProxy's metrics": 9101, "HAProxy's statistics": 8404}
WORKER_PORTS = range(10002, 20000)
"""Ray hands these out to its worker processes."""
ENGINE_SHM_BYTES = 16 * 2**20
"""What UCX maps for one rank, its peers' part included."""

SECRETS = {
    "SPLITSERVE_CLUSTER_TOKEN": "cluster_token_secret",
    "RAY_AUTH_TOKEN": "ray_token_secret",
    "HF_TOKEN": "hub_token_secret",
}
"""Variables that no manifest shall show, and the keys that name a secret instead."""
SECRETS_OF_HOSTS = {
    "SPLITSERVE_CLUSTER_TOKEN": "`splitserve deploy` makes one on the head node and keeps it there",
    "RAY_AUTH_TOKEN": "name its file in deploy.ray_up.auth_token_file",
    "HF_TOKEN": "copy its file to ~/.cache/huggingface/token with deploy.ray_up.file_mounts",
}
"""Variables that no file for `ray up` shall show, and how hosts come to them instead."""


def check_for_hosts(config: ClusterConfig) -> None:
    """For machines that the rendered files bring. Raises `StartupError`."""
    if config.model.startswith(("~", ".")) or (
        config.model.endswith(".gguf") and not PurePath(config.model).is_absolute()
    ):
        raise StartupError(
            f"model is {config.model}, which each host would look for in another folder: name a hub id,"
            " or the path that it has on all of them"
        )
    offered = {name for role in Role for name in pool_resources(config, role)}
    for name in config.router.resources:
        if name not in offered and not name.startswith(RAYS_OWN):
            raise StartupError(
                f"router.resources asks for {name}, which no host will offer: those of the pools offer"
                f" {', '.join(sorted(offered))}, the head node:__internal_head__"
            )


def check_for_ssh(config: ClusterConfig) -> None:
    """For the file of `ray up`. Raises `StartupError`."""
    for name, instead in SECRETS_OF_HOSTS.items():
        if name in config.deploy.ray_up.environment:
            raise StartupError(
                f"deploy.ray_up.environment holds {name}, which the file would show to all: {instead}"
            )
    _check_port(config.http.port, "on the head node")
    head, hosts = config.deploy.ray_up.head.host, _hosts(config)
    if is_loopback(head) and not all(map(is_loopback, hosts)):
        raise StartupError(
            f"deploy.ray_up.head.host is {head}, by which no other host reaches it: give its address"
        )


def _hosts(config: ClusterConfig) -> list[str]:
    ray_up = config.deploy.ray_up
    return [*ray_up.prefill.hosts, *ray_up.decode.hosts]


def check_for_pods(config: ClusterConfig) -> None:
    """`config` is that of several hosts already. Raises `StartupError`."""
    _check_port(config.http.port, "in the pods")
    _check_unprivileged(config.http.port)
    _check_secrets(config)
    for role in Role:
        host = config.pool(role).host
        if host != "auto":
            raise StartupError(
                f"{role.value}.host is {host}, but every pod has an address of its own: leave it out"
            )
        _check_shm(config, role)


def _check_port(port: int, where: str) -> None:
    ports = HEAD_PORTS | {"metrics": METRICS_PORT} | PROXY_PORTS
    taken = {number: name for name, number in ports.items()}
    if port in taken or port in WORKER_PORTS:
        used_for = taken.get(port, "worker processes")
        raise StartupError(
            f"http.port is {port}, which Ray uses for its {used_for} {where}: choose another"
        )


def _check_unprivileged(port: int) -> None:
    if port < FIRST_FREE_PORT:
        raise StartupError(
            f"http.port is {port}, but pods do not run as root: choose one from {FIRST_FREE_PORT}, and let"
            " an Ingress or a Service of type LoadBalancer listen there"
        )


def _check_secrets(config: ClusterConfig) -> None:
    for name, key in SECRETS.items():
        if name in config.deploy.kuberay.environment:
            raise StartupError(
                f"deploy.kuberay.environment holds {name}, which the manifests would show to all: make a"
                f" secret of it, and name that in deploy.kuberay.{key}"
            )


def _check_shm(config: ClusterConfig, role: Role) -> None:
    pod = config.deploy.kuberay.prefill if role is Role.PREFILL else config.deploy.kuberay.decode
    num_ranks = pod.workers_per_pod * config.layout_of(config.pool(role)).num_ranks
    needed = config.ray.object_store_bytes + num_ranks * ENGINE_SHM_BYTES
    if pod.shm < needed:
        raise StartupError(
            f"deploy.kuberay.{role.value}.shm is {pod.shm:,} bytes, but Ray's object store"
            f" (ray.object_store_bytes) and UCX take {needed:,}: raise it"
        )
