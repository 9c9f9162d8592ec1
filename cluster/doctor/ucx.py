"""What is UCX told by its environment, and can it do so?"""

from __future__ import annotations

import re
from collections.abc import Mapping

import psutil

from cluster.doctor.facts import NodeFacts, Seen, Ucx
from cluster.doctor.findings import Findings, Topic, difference
from cluster.environment import ucx_variables

CHECK = "ucx"
DEVICES, TRANSPORTS = "UCX_NET_DEVICES", "UCX_TLS"
SHARED_MEMORY = frozenset({"all", "sm", "shm", "mm", "posix", "sysv", "cma", "knem", "xpmem"})
GROUPS = frozenset({"sm", "shm", "ib"})
"""Names that stand for all of one of these two."""
RDMA = frozenset(
    {
        "all",
        "ib",
        "rc",
        "rc_x",
        "rc_v",
        "rc_mlx5",
        "rc_verbs",
        "dc",
        "dc_x",
        "dc_mlx5",
        "ud",
        "ud_x",
        "ud_v",
    }
)


def probe_ucx() -> Ucx:
    return Ucx(ucx_variables(), tuple(sorted(psutil.net_if_addrs())))


def allows(variables: Mapping[str, str], transports: frozenset[str]) -> bool:
    """Whether UCX_TLS leaves any of `transports` to choose; unset leaves all."""
    named = variables.get(TRANSPORTS, "all")
    if named.startswith("^"):
        return not transports & GROUPS & set(named[1:].split(","))
    return bool(transports & {name.split(":")[0].lstrip("\\") for name in named.split(",")})


def check_ucx(seen: Seen) -> Findings:
    for node in seen.nodes:
        if node.ucx is not None:
            yield from _check_node(seen, node, node.ucx)
    told = {node.name: node.ucx.variables.get(TRANSPORTS, "(not set)") for node in seen.nodes if node.ucx}
    if what := difference(TRANSPORTS, told):
        yield Topic("all nodes", CHECK).warning(what, "two sides that share no transport cannot connect")


def _check_node(seen: Seen, node: NodeFacts, ucx: Ucx) -> Findings:
    topic = Topic(node.name, CHECK)
    told = " ".join(f"{name}={value}" for name, value in sorted(ucx.variables.items()))
    yield topic.ok(told or "no UCX_* variable is set: it chooses by itself")
    yield from _check_devices(seen, node, ucx, topic)
    if not allows(ucx.variables, SHARED_MEMORY) and len(seen.nodes) == 1:
        yield topic.warning(
            f"{TRANSPORTS} leaves out shared memory, and all workers are on this node",
            f"unset {TRANSPORTS}, or add sm to it",
        )
    if node.rdma and node.rdma.is_active and not allows(ucx.variables, RDMA):
        yield topic.warning(
            f"{TRANSPORTS} leaves out RDMA, which this node has", f"unset {TRANSPORTS}, or add rc to it"
        )


def _check_devices(seen: Seen, node: NodeFacts, ucx: Ucx, topic: Topic) -> Findings:
    named = ucx.variables.get(DEVICES, "all")
    if named == "all" or named.startswith("^") or re.search(r"[*?\[]", named):
        return
    there = {*ucx.interfaces, *(port.name for port in (node.rdma.ports if node.rdma else ()))}
    if absent := [name for name in named.split(",") if name not in there]:
        yield topic.problem(
            f"{DEVICES} names {', '.join(absent)}, and there are only {', '.join(sorted(there))}",
            f"correct or unset {DEVICES} on this node",
        )
    elif set(named.split(",")) == {"lo"} and len(seen.nodes) > 1:
        yield topic.problem(
            f"{DEVICES} is lo: no other node can read this one's KV",
            f"unset {DEVICES} where Ray is started on this node",
        )
