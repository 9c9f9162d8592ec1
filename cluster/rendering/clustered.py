"""What must a configuration say once its workers live on several hosts?

The same file serves a laptop, where everything listens on loopback. On a cluster that would leave every
worker alone, so these keys follow from the place, and only they.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from cluster.config import ClusterConfig, PoolConfig
from protocol.errors import StartupError
from protocol.ids import Role

ALL_ADDRESSES = "0.0.0.0"  # noqa: S104  # of a node, where clients come from outside
ON_HEAD = {"node:__internal_head__": 0.001}
"""Ray's own name for its head node, of which there is one."""

Number = TypeVar("Number", int, float)


def clustered(config: ClusterConfig) -> ClusterConfig:
    """`config` with what several hosts need, where it did not say so itself.

    Workers listen on their node's own address; clients reach any node, through Serve's proxy; each pool
    is placed by a custom Ray resource of its own. Raises `StartupError` for what can work on no cluster.
    """
    if config.kv_transfer.transport == "loopback":
        raise StartupError("kv_transfer.transport is loopback, which leaves no process: set it to nixl")
    if config.http.port == 0:
        raise StartupError("http.port is 0, but every node must listen on the same one: name it")
    http = {"through": "proxy", "host": _reachable(config.http.host, ALL_ADDRESSES)}
    pools = {role.value: _placed(role, config.pool(role)) for role in Role}
    places: dict[str, Any] = {
        "http": config.http.model_copy(update=http),
        "ray": config.ray.model_copy(update={"address": "auto"}),
    }
    return config.model_copy(update=places | pools)


def for_deployment(config: ClusterConfig) -> ClusterConfig:
    """What `config` comes to on a cluster of several hosts. Raises `StartupError`.

    Clients reach the head node: where no HTTP proxies are asked for, the router itself runs there.
    """
    here = clustered(config)
    address = config.ray.address or "auto"
    here = here.model_copy(update={"ray": config.ray.model_copy(update={"address": address})})
    if config.http.through == "proxy":
        return here
    http = here.http.model_copy(update={"through": config.http.through})
    router = here.router.model_copy(update={"resources": config.router.resources or ON_HEAD})
    return here.model_copy(update={"http": http, "router": router})


def is_prepared_for(config: ClusterConfig, offered: Iterable[str]) -> bool:
    """Whether nodes offer the resources that only what is rendered here asks for."""
    mine = {_placed_by_default(role) for role in Role if not config.pool(role).resources}
    return not mine.isdisjoint(offered)


def pool_resources(config: ClusterConfig, role: Role) -> dict[str, float]:
    """The custom Ray resources that one rank of a pool's workers takes: its nodes must offer them."""
    return _resources(role, config.pool(role))


def added(some: Mapping[str, Number], more: Mapping[str, Number]) -> dict[str, Number]:
    """What a place must offer that has workers of both pools, which may take the same resource."""
    both = {name: some[name] + more[name] for name in some if name in more}
    return {**some, **more, **both}


def _placed(role: Role, pool: PoolConfig) -> PoolConfig:
    resources = _resources(role, pool)
    return pool.model_copy(update={"host": _reachable(pool.host, "auto"), "resources": resources})


def _resources(role: Role, pool: PoolConfig) -> dict[str, float]:
    return dict(pool.resources) or {_placed_by_default(role): 1.0}


def _placed_by_default(role: Role) -> str:
    return f"splitserve_{role.value}"


def _reachable(host: str, instead: str) -> str:
    return instead if is_loopback(host) else host


def is_loopback(host: str) -> bool:
    """Whether nothing but its own machine reaches that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
