"""Which groups of equal pods does a configuration take, and how big is each of them?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.config import ClusterConfig, PoolConfig
from cluster.deploy_kuberay import PodConfig
from cluster.rendering.clustered import added, pool_resources
from protocol.errors import StartupError
from protocol.ids import Role

UNITS = (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10))


@dataclass(frozen=True, slots=True)
class PodGroup:
    """A worker group of KubeRay. Numbers are those of one pod, unless they count pods."""

    name: str
    num_pods: int
    max_pods: int
    cpus: int
    gpus: float
    memory_bytes: int
    shm_bytes: int
    ray_resources: Mapping[str, float]
    node_selector: Mapping[str, str]


def pod_groups(config: ClusterConfig) -> list[PodGroup]:
    """One group per pool, or one for both. Raises `StartupError` where a pod cannot hold its workers."""
    groups = [_group(config, role) for role in Role]
    return [_merged(groups)] if config.deploy.kuberay.share_pods else groups


def _group(config: ClusterConfig, role: Role) -> PodGroup:
    pool, pod = config.pool(role), _pod(config, role)
    num_ranks = pod.workers_per_pod * config.layout_of(pool).num_ranks
    _check_room(role.value, pool, pod, num_ranks)
    return PodGroup(
        name=role.value,
        num_pods=math.ceil(pool.least_num_workers / pod.workers_per_pod),
        max_pods=math.ceil(pool.most_num_workers / pod.workers_per_pod),
        cpus=pod.cpus,
        gpus=pool.num_gpus * num_ranks,
        memory_bytes=pod.memory,
        shm_bytes=pod.shm,
        ray_resources={name: amount * num_ranks for name, amount in pool_resources(config, role).items()},
        node_selector=pod.node_selector,
    )


def _pod(config: ClusterConfig, role: Role) -> PodConfig:
    kuberay = config.deploy.kuberay
    return kuberay.prefill if role is Role.PREFILL else kuberay.decode


def _check_room(name: str, pool: PoolConfig, pod: PodConfig, num_ranks: int) -> None:
    """What Ray or the kernel would find out an hour later: workers that wait for ever, or are killed.

    A pod holds all ranks of its workers, so many.
    """
    where = f"deploy.kuberay.{name}"
    if pool.num_cpus * num_ranks > pod.cpus:
        raise StartupError(
            f"{where}.cpus is {pod.cpus}, but its {_in_words(pod.workers_per_pod, num_ranks)} reserve"
            f" {pool.num_cpus:g} each ({name}.num_cpus): Ray would never start the last one"
        )
    on_host = pool.swap_memory + (0 if pool.num_gpus or pool.kv_cache_share else pool.kv_cache_memory)
    needed = pod.shm + num_ranks * on_host
    if needed >= pod.memory:
        raise StartupError(
            f"{where}.memory is {pod.memory:,} bytes, but /dev/shm and the KV blocks of its workers alone"
            f" take {needed:,}: raise it, or lower {where}.shm or {name}.kv_cache_memory"
        )


def _in_words(num_workers: int, num_ranks: int) -> str:
    if num_ranks == num_workers:
        return f"{num_workers} workers"
    return f"{num_ranks} ranks (of {num_workers} workers)"


def _merged(groups: list[PodGroup]) -> PodGroup:
    """Pods that hold the workers of both pools."""
    prefill, decode = groups
    if (prefill.num_pods, prefill.max_pods) != (decode.num_pods, decode.max_pods):
        raise StartupError(
            f"deploy.kuberay.share_pods puts both pools into the same pods, but prefill takes"
            f" {prefill.num_pods} and decode {decode.num_pods}: let workers_per_pod of both make them agree"
        )
    return PodGroup(
        name="workers",
        num_pods=prefill.num_pods,
        max_pods=prefill.max_pods,
        cpus=prefill.cpus + decode.cpus,
        gpus=prefill.gpus + decode.gpus,
        memory_bytes=prefill.memory_bytes + decode.memory_bytes,
        shm_bytes=prefill.shm_bytes + decode.shm_bytes,
        ray_resources=added(prefill.ray_resources, decode.ray_resources),
        node_selector=_common_selector(prefill, decode),
    )


def _common_selector(prefill: PodGroup, decode: PodGroup) -> dict[str, str]:
    for label, value in prefill.node_selector.items():
        other = decode.node_selector.get(label, value)
        if other != value:
            raise StartupError(
                f"deploy.kuberay.share_pods puts both pools into the same pods, but node_selector.{label}"
                f" is {value!r} for prefill and {other!r} for decode: make them agree"
            )
    return {**prefill.node_selector, **decode.node_selector}


def quantity(num_bytes: int) -> str:
    """Bytes as Kubernetes writes them, `16Gi`, say; in the largest unit that is exact."""
    return next(
        (f"{num_bytes // size}{unit}" for unit, size in UNITS if num_bytes % size == 0), str(num_bytes)
    )
