"""Where can the workers run, and is there room for all of them?

Ray decides when they start. This is an estimate: each pool spread evenly over the nodes that have what one
rank of its workers asks for, the ranks of a worker together where they can be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from cluster.config import PoolConfig
from cluster.doctor.facts import NodeFacts, Seen
from cluster.doctor.findings import Findings, Topic
from protocol.ids import Role

CHECK = "placement"
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def demand_of(pool: PoolConfig) -> dict[str, float]:
    """What Ray reserves for one rank."""
    wanted = {"CPU": pool.num_cpus, "GPU": pool.num_gpus, **pool.resources}
    return {name: amount for name, amount in wanted.items() if amount}


def num_fitting(resources: Mapping[str, float], demand: Mapping[str, float]) -> int | None:
    """Ranks that a node has room for were there no others; None: any number."""
    if not demand:
        return None
    return min(int(resources.get(name, 0.0) / amount) for name, amount in demand.items())


def is_counted_by_ray(seen: Seen) -> bool:
    """Not so where a cluster is still to be started, which then has what its configuration asks for."""
    return not seen.is_one_machine and any(node.resources for node in seen.nodes)


def eligible_nodes(seen: Seen, role: Role) -> list[NodeFacts]:
    """Nodes that have what one rank asks for."""
    demand = demand_of(seen.config.pool(role))
    if not is_counted_by_ray(seen):
        return list(seen.nodes)
    return [node for node in seen.nodes if num_fitting(node.resources, demand) != 0]


def ranks_on(seen: Seen, node: NodeFacts) -> dict[Role, int]:
    """How many ranks of each role's workers a node is likely to get at most."""
    return {role: _share(seen, node, role) for role in Role}


def _share(seen: Seen, node: NodeFacts, role: Role) -> int:
    nodes, pool = eligible_nodes(seen, role), seen.config.pool(role)
    if node not in nodes:
        return 0
    share = math.ceil(pool.most_num_workers / len(nodes)) * seen.config.layout_of(pool).num_ranks
    room = num_fitting(node.resources, demand_of(pool)) if is_counted_by_ray(seen) else None
    return share if room is None else min(share, room)


def num_ranks_on(seen: Seen, node: NodeFacts) -> int:
    return sum(ranks_on(seen, node).values())


def check_placement(seen: Seen) -> Findings:
    if not is_counted_by_ray(seen):
        return
    for role in Role:
        yield from _check_pool(seen, role)
    yield from _check_hosts(seen)


def _check_pool(seen: Seen, role: Role) -> Findings:
    topic, pool = Topic(f"{role} pool", CHECK), seen.config.pool(role)
    demand = demand_of(pool)
    wanted = ", ".join(f"{name} {amount:g}" for name, amount in demand.items()) or "nothing"
    num_ranks = seen.config.layout_of(pool).num_ranks
    if num_ranks > 1:
        wanted = f"{num_ranks} x ({wanted})"
    total = _num_workers([num_fitting(node.resources, demand) for node in seen.nodes], pool, num_ranks)
    least, most = pool.least_num_workers, pool.most_num_workers
    if total is not None and total < least:
        yield topic.problem(
            f"{least} workers ask for {wanted} each, and the nodes have room for {total}",
            f"add nodes that offer it, or lower {role}.num_workers, num_cpus, num_gpus or resources",
        )
    elif total is not None and total < most:
        yield topic.info(
            f"{wanted} each: the pool may grow to {most} workers, and the nodes have room for {total}",
            "nothing where nodes are added by themselves; else add some, or lower autoscaling.max_workers",
        )
    else:
        names = ", ".join(node.name for node in eligible_nodes(seen, role))
        yield topic.ok(f"{most} worker(s), {wanted} each, fit on {names}")


def _num_workers(rooms: Sequence[int | None], pool: PoolConfig, num_ranks: int) -> int | None:
    """That fit on nodes with room for so many ranks each; None: any number."""
    if None in rooms:
        return None
    known = [room for room in rooms if room]
    if pool.placement_strategy == "STRICT_PACK":
        return sum(room // num_ranks for room in known)
    return sum(known) // num_ranks


def _check_hosts(seen: Seen) -> Findings:
    """Workers that listen on loopback are not found from other nodes."""
    if len(seen.nodes) < 2:
        return
    for role in Role:
        if seen.config.pool(role).host in LOOPBACK:
            yield Topic(f"{role} pool", "host").problem(
                f"{role}.host is {seen.config.pool(role).host}: no other node reaches these workers",
                f"set {role}.host to auto, which is each node's own address",
            )
