"""What must a configuration say once its workers live on several hosts?

The same file serves a laptop, where everything listens on loopback. On a cluster that would leave every
worker alone, so these keys follow from the place, and only they.
"""

from __future__ import annotations

from typing import Any

from cluster.config import ClusterConfig, PoolConfig
from protocol.errors import StartupError
from protocol.ids import Role

LOOPBACK = "127.0.0.1"
ALL_ADDRESSES = "0.0.0.0"  # noqa: S104  # of a node, where clients come from outside


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


def pool_resources(config: ClusterConfig, role: Role) -> dict[str, float]:
    """The custom Ray resources that one worker of a pool takes: its nodes must offer them."""
    return _resources(role, config.pool(role))


def _placed(role: Role, pool: PoolConfig) -> PoolConfig:
    resources = _resources(role, pool)
    return pool.model_copy(update={"host": _reachable(pool.host, "auto"), "resources": resources})


def _resources(role: Role, pool: PoolConfig) -> dict[str, float]:
    return dict(pool.resources) or {f"splitserve_{role.value}": 1.0}


def _reachable(host: str, instead: str) -> str:
    return instead if host == LOOPBACK else host
