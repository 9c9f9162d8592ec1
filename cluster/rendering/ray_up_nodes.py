"""Which machines does `ray up` use, and what does each offer to the workers that are to be placed?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cluster.config import ClusterConfig
from cluster.deploy_ray_up import HeadNode, PoolHosts, RayUp
from cluster.rendering.clustered import added, pool_resources
from protocol.errors import StartupError
from protocol.ids import Role

HEAD = "head"


def hosts_of(ray_up: RayUp, role: Role) -> PoolHosts:
    return ray_up.prefill if role is Role.PREFILL else ray_up.decode


def provider_of(config: ClusterConfig) -> dict[str, Any]:
    """The `provider` section. Raises `StartupError` when a key is missing."""
    ray_up = config.deploy.ray_up
    if ray_up.provider == "local":
        head = _need(ray_up.head.host, "head.host", "the address of the head node")
        offers = offers_by_host(config)
        if head in offers:
            raise StartupError(
                f"deploy.ray_up.head.host, {head}, is a host of a pool, too: the head node computes nothing"
            )
        return {"type": "local", "head_ip": head, "worker_ips": list(offers)}
    provider = {"type": ray_up.provider, "region": _need(ray_up.region, "region", "where the machines are")}
    if ray_up.zone:
        provider["availability_zone"] = ray_up.zone
    if ray_up.provider == "gcp":
        provider["project_id"] = _need(ray_up.project_id, "project_id", "your project")
    return provider | ({"cache_stopped_nodes": False} if ray_up.provider == "aws" else {})


def offers_by_host(config: ClusterConfig) -> dict[str, dict[str, int]]:
    """For machines that run already: what each host offers. Raises `StartupError`."""
    offers: dict[str, dict[str, int]] = {}
    for role in Role:
        hosts = hosts_of(config.deploy.ray_up, role).hosts
        if not hosts:
            raise StartupError(f"deploy.ray_up.{role.value}.hosts is empty: name the hosts of this pool")
        for host in hosts:
            offers[host] = added(offers.get(host, {}), _offer(config, role, len(hosts)))
    return offers


def node_types(config: ClusterConfig) -> dict[str, dict[str, Any]]:
    """For machines that Ray starts: `available_node_types`. Raises `StartupError`."""
    ray_up = config.deploy.ray_up
    head = {"resources": {"CPU": 0}, "node_config": _node_config(ray_up, HEAD, ray_up.head)}
    return {HEAD: head} | {role.value: _worker_type(config, role) for role in Role}


def num_workers(config: ClusterConfig) -> int:
    """Nodes beside the head node, at most."""
    ray_up = config.deploy.ray_up
    if ray_up.provider == "local":
        return len(offers_by_host(config))
    return sum(_max_num_hosts(hosts_of(ray_up, role)) for role in Role)


def _worker_type(config: ClusterConfig, role: Role) -> dict[str, Any]:
    ray_up = config.deploy.ray_up
    hosts = hosts_of(ray_up, role)
    return {
        "min_workers": hosts.num_hosts,
        "max_workers": _max_num_hosts(hosts),
        "resources": _offer(config, role, _max_num_hosts(hosts)),
        "node_config": _node_config(ray_up, role.value, hosts),
    }


def _max_num_hosts(hosts: PoolHosts) -> int:
    return max(hosts.num_hosts, hosts.max_num_hosts or 0)


def _offer(config: ClusterConfig, role: Role, num_hosts: int) -> dict[str, int]:
    """Room for a host's share of the workers, each with all its ranks, and of those that a rolling update
    starts early."""
    pool = config.pool(role)
    num_workers = math.ceil(pool.most_num_workers * (100 + pool.max_surge_percent) / 100)
    share = math.ceil(num_workers / num_hosts) * config.layout_of(pool).num_ranks
    return {name: math.ceil(share * amount) for name, amount in pool_resources(config, role).items()}


def _node_config(ray_up: RayUp, name: str, node: HeadNode | PoolHosts) -> dict[str, Any]:
    kind = _need(node.instance_type, f"{name}.instance_type", "a kind of machine")
    rendered = _aws_node(ray_up, kind) if ray_up.provider == "aws" else _gcp_node(ray_up, kind)
    return _laid_over(rendered, node.node_config)


def _aws_node(ray_up: RayUp, kind: str) -> dict[str, Any]:
    image = {"ImageId": ray_up.image} if ray_up.image else {}
    disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": ray_up.disk_gb, "VolumeType": "gp3"}}
    return {"InstanceType": kind, **image, "BlockDeviceMappings": [disk]}


def _gcp_node(ray_up: RayUp, kind: str) -> dict[str, Any]:
    parameters = {
        "diskSizeGb": ray_up.disk_gb,
        "sourceImage": _need(ray_up.image, "image", "a source image"),
    }
    disk = {"boot": True, "autoDelete": True, "type": "PERSISTENT", "initializeParams": parameters}
    return {"machineType": kind, "disks": [disk]}


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` wins; mappings are merged, lists are replaced."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        both = isinstance(under, Mapping) and isinstance(value, Mapping)
        merged[key] = _laid_over(under, value) if both else value  # type: ignore[arg-type]
    return merged


def _need(value: str | None, key: str, what: str) -> str:
    if not value:
        raise StartupError(f"deploy.ray_up.{key} is empty: name {what}")
    return value
