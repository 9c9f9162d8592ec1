"""Followers as Ray actors in the placement group of the Serve replica that leads them.

Serve makes the group with a bundle per rank, and puts the replica into the first one. An actor dies with
the replica that started it, and with the group.
"""

from __future__ import annotations

import concurrent.futures
import logging
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import PoolConfig
from cluster.ranks.launch import RankHandle
from cluster.ranks.spec import RankSpec
from protocol.errors import StartupError

AUTO = "auto"

logger = logging.getLogger(__name__)


def own_address() -> str:
    """The address by which other nodes reach this one."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def bundles_of(pool: PoolConfig, num_ranks: int) -> list[dict[str, float]]:
    """What Ray reserves for one worker: the same for each rank."""
    wanted = {"CPU": pool.num_cpus, "GPU": pool.num_gpus, **pool.resources}
    bundle = {name: amount for name, amount in wanted.items() if amount}
    return [dict(bundle or {"CPU": 0.001}) for _ in range(num_ranks)]  # Ray refuses empty ones


class ActorLauncher:
    """Starts actors from within a replica."""

    def __init__(self, pool: PoolConfig) -> None:
        self._pool = pool

    @property
    def host(self) -> str:
        return own_address() if self._pool.host == AUTO else self._pool.host

    def launch(self, spec: RankSpec) -> RankHandle:
        group = get_current_placement_group()
        if group is None:
            raise StartupError("this replica has no placement group, in which its other ranks could be")
        actor = ray.remote(RankActor).options(
            num_cpus=self._pool.num_cpus,
            num_gpus=self._pool.num_gpus,
            resources=dict(self._pool.resources),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=spec.rank
            ),
        )
        return RankRef(actor.remote(), spec)


class RankActor:
    """One rank that is not the leader."""

    def follow(self, spec: RankSpec, is_by_node: bool) -> None:
        """Until the leader stops it, or is gone. `is_by_node`: ranks have their nodes' own addresses."""
        from cluster.ranks.follower import follow

        logging.basicConfig(level=logging.INFO, force=True)
        follow(replace(spec, host=own_address()) if is_by_node else spec)


class RankRef:
    """One such actor, from its leader's process."""

    def __init__(self, actor: Any, spec: RankSpec) -> None:  # Ray types an actor's handle as Any
        self._actor = actor
        is_by_node = spec.cluster_config().pool(spec.role).host == AUTO
        self._end: concurrent.futures.Future[None] = actor.follow.remote(spec, is_by_node).future()

    @property
    def alive(self) -> bool:
        return not self._end.done()

    def end(self, grace_s: float) -> None:
        concurrent.futures.wait([self._end], timeout=grace_s)
        ray.kill(self._actor)
