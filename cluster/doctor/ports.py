"""Is the port that clients connect to free, or held by our own server?"""

from __future__ import annotations

from cluster.config import ClusterConfig
from cluster.doctor.facts import Seen
from cluster.doctor.findings import Findings, Topic
from cluster.serve_port import with_free_port
from protocol.errors import StartupError

CHECK = "port"


def probe_http_port(config: ClusterConfig) -> str | None:
    """Why the port cannot be listened on; None when it can."""
    try:
        with_free_port(config)
    except StartupError as error:
        return error.message
    return None


def check_ports(seen: Seen) -> Findings:
    taken = {node.name: node.http_port_problem for node in seen.nodes if node.http_port_problem}
    everywhere = len(taken) == len(seen.nodes)
    for node in seen.nodes:
        topic = Topic(node.name, CHECK)
        problem = taken.get(node.name)
        if problem is None:
            continue
        what, _, todo = problem.partition("; ")
        if seen.is_running:
            yield topic.ok(f"port {seen.config.http.port} is held by the running server")
        elif everywhere:
            yield topic.problem(what, todo)
        else:
            yield topic.warning(what, f"{todo}; a router that Ray places here would not start")
    if not taken and seen.nodes:
        port = seen.config.http.port or "of any number"
        yield Topic(seen.nodes[0].name if len(seen.nodes) == 1 else "all nodes", CHECK).ok(
            f"port {port} is free"
        )
