"""`splitserve doctor`: gathers facts of nodes and cluster, has blocks read, and checks it all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from cluster.background import Background
from cluster.config import ClusterConfig
from cluster.doctor.clock import check_clocks, seen_from
from cluster.doctor.facts import NODE, BlockRead, Live, NodeFacts, Seen
from cluster.doctor.findings import Finding, Findings, Topic
from cluster.doctor.gpus import check_gpus
from cluster.doctor.limits import check_limits
from cluster.doctor.live import look_at_cluster
from cluster.doctor.memory import check_memory
from cluster.doctor.model import check_model
from cluster.doctor.node import Node, this_machine
from cluster.doctor.placement import check_placement
from cluster.doctor.pools import check_pools
from cluster.doctor.ports import check_ports
from cluster.doctor.rdma import check_rdma
from cluster.doctor.read_plan import ReadPlan, pairs_of, plan_reads
from cluster.doctor.reads import check_reads
from cluster.doctor.service import check_service
from cluster.doctor.shm import check_shm
from cluster.doctor.ucx import check_ucx
from cluster.doctor.versions import check_versions
from cluster.doctor.workers import check_workers
from cluster.rendering import for_deployment, is_prepared_for
from cluster.serve_state import read_state
from protocol.errors import SplitserveError, WorkerUnavailable

NODE_LIMIT_S = 60.0
"""For the facts of one node, its actor's start included."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found, and what it was found from."""

    seen: Seen
    findings: tuple[Finding, ...]


def check_failures(seen: Seen) -> Findings:
    """A probe that found nothing out is a finding as well."""
    for node in seen.nodes:
        for probe, why in node.failures.items():
            if probe == NODE:
                yield Topic(node.name, probe).problem(
                    f"this node does not answer: {why}", "is Ray alive there, and is splitserve installed?"
                )
            else:
                yield Topic(node.name, probe).warning(
                    f"could not be looked at: {why}", "look by hand; no other check depends on it"
                )


CHECKS: tuple[Callable[[Seen], Findings], ...] = (
    check_failures,
    check_versions,
    check_gpus,
    check_rdma,
    check_ucx,
    check_shm,
    check_limits,
    check_memory,
    check_model,
    check_ports,
    check_clocks,
    check_pools,
    check_placement,
    check_service,
    check_workers,
    check_reads,
)


def check_all(seen: Seen) -> tuple[Finding, ...]:
    return tuple(finding for check in CHECKS for finding in check(seen))


def diagnose(config: ClusterConfig, url: str | None, tell: Tell) -> Diagnosis:
    """Takes seconds, and some more per pair of nodes. `url`: the service to ask beside what is found.

    `tell` hears what is being done.
    """
    config = as_deployed(config)
    tell("looking for a running cluster")
    with look_at_cluster(config, url) as (live, found):
        nodes: Sequence[Node] = found or [this_machine(config)]
        return examine(config, nodes, live, tell)


def examine(config: ClusterConfig, nodes: Sequence[Node], live: Live, tell: Tell) -> Diagnosis:
    """The same for nodes that are known already."""
    tell(f"asking {len(nodes)} node(s)")
    with _stopping(nodes):
        facts = tuple(_facts_of(nodes))
        seen = Seen(as_prepared(config, facts), facts, live)
        by_name = {node.name: node for node in nodes}
        pairs = [(by_name[owner], by_name[reader]) for owner, reader in pairs_of(seen)]
        seen = replace(seen, reads=tuple(_read_between(pairs, plan_reads(seen), tell)))
    return Diagnosis(seen, check_all(seen))


def as_deployed(config: ClusterConfig) -> ClusterConfig:
    """What `splitserve deploy` made of it, where it did."""
    state = read_state(config)
    if state is None or not state.is_deployed:
        return config
    ray = config.ray.model_copy(update={"address": config.ray.address or state.ray_address})
    return for_deployment(config.model_copy(update={"ray": ray}))


def as_prepared(config: ClusterConfig, nodes: Sequence[NodeFacts]) -> ClusterConfig:
    """What `splitserve deploy` will make of it, where the nodes were started for that."""
    offered = {name for node in nodes for name in node.resources}
    return for_deployment(config) if is_prepared_for(config, offered) else config


@contextmanager
def _stopping(nodes: Sequence[Node]) -> Iterator[None]:
    try:
        yield
    finally:
        for node in nodes:
            node.stop()


def _facts_of(nodes: Sequence[Node]) -> Iterator[NodeFacts]:
    """All nodes at once."""
    calls = [(node, Background(f"doctor: {node.name}", partial(_timed, node))) for node in nodes]
    for node, call in calls:
        try:
            if not call.wait(NODE_LIMIT_S):
                raise WorkerUnavailable(f"no answer within {NODE_LIMIT_S:.0f} s")
            yield call.result()
        except SplitserveError as error:
            yield NodeFacts(node.name, failures={NODE: error.message})


def _timed(node: Node) -> NodeFacts:
    asked_at_s = time.time()
    facts = node.examine()
    if facts.clock is None:
        return facts
    return replace(facts, clock=seen_from(facts.clock, asked_at_s, time.time()))


def _read_between(pairs: Sequence[tuple[Node, Node]], plan: ReadPlan, tell: Tell) -> Iterator[BlockRead]:
    """One after the other: they would measure each other."""
    for owner, reader in pairs:
        tell(f"reading blocks of {owner.name} from {reader.name}")
        read = BlockRead(owner.name, reader.name, plan.num_blocks, plan.block_bytes)
        try:
            found = reader.read_blocks(owner.own_blocks(plan), plan)
        except SplitserveError as error:
            yield replace(read, error=error.message)
        else:
            yield replace(
                read,
                first_s=found.first_s,
                seconds=found.seconds,
                transport=found.transport,
                ucx_version=found.ucx_version,
            )
