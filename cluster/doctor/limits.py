"""May processes lock enough memory for RDMA, and open enough files for all clients?"""

from __future__ import annotations

import resource

from cluster.doctor.facts import Limits, NodeFacts, Seen
from cluster.doctor.findings import Finding, Findings, Topic, in_words

FILES_BESIDE_CLIENTS = 512
"""Libraries, logs, Ray, gRPC and UCX of one process."""
LEAST_MEMLOCK_BYTES = 2**20
"""Below it even UCX without RDMA has to do without what it would lock."""


def probe_limits() -> Limits:
    """Those of this process, which what it starts inherits."""
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    nofile, nofile_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(_finite(memlock), _finite(nofile), _finite(nofile_hard))


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def check_limits(seen: Seen) -> Findings:
    for node in seen.nodes:
        if node.limits is not None:
            yield _check_memlock(node, node.limits, has_rdma=bool(node.rdma and node.rdma.is_active))
            yield _check_nofile(seen, node, node.limits)


def _check_memlock(node: NodeFacts, limits: Limits, *, has_rdma: bool) -> Finding:
    topic = Topic(node.name, "memlock")
    if limits.memlock_bytes is None:
        return topic.ok("memory may be locked without limit")
    what = f"only {in_words(limits.memlock_bytes)} of memory may be locked (ulimit -l)"
    todo = (
        "ulimit -l unlimited where Ray or the server is started; in a container the capability IPC_LOCK"
        " and --ulimit memlock=-1"
    )
    if has_rdma:
        return topic.problem(f"{what}: a KV pool cannot be registered with RDMA devices", todo)
    if limits.memlock_bytes < LEAST_MEMLOCK_BYTES:
        return topic.warning(f"{what}: too little should this node get RDMA devices", todo)
    return topic.ok(f"{what}, which nothing asks for without RDMA devices")


def _check_nofile(seen: Seen, node: NodeFacts, limits: Limits) -> Finding:
    topic = Topic(node.name, "nofile")
    num_clients = seen.config.router.max_num_inflight
    needed = num_clients + FILES_BESIDE_CLIENTS
    if limits.nofile is None:
        return topic.ok("any number of open files per process")
    what = f"{limits.nofile:,} open files per process (ulimit -n)"
    if limits.nofile >= needed:
        return topic.ok(what)
    return topic.warning(
        f"{what}, but a router with {num_clients:,} requests in flight may need {needed:,}",
        f"ulimit -n {max(65536, needed)} where Ray or the server is started",
    )
