"""Does the running service answer, and did a hand-off succeed lately?"""

from __future__ import annotations

from cluster.doctor.facts import Seen, Service
from cluster.doctor.findings import Findings, Topic
from cluster.serve_port import http_answers

CHECK = "service"


def probe_service(url: str) -> Service:
    """Asks the router's two probes, some seconds each at most."""
    url = url.rstrip("/").removesuffix("/v1")
    return Service(url, http_answers(url, "/health"), http_answers(url, "/ready"))


def check_service(seen: Seen) -> Findings:
    service = seen.live.service
    if service is None:
        return
    topic = Topic(service.url, CHECK)
    if not service.is_alive and not service.is_ready:
        yield topic.problem("no router answers there", "is it the right --url, and does the server run?")
    elif not service.is_ready:
        yield topic.problem(
            "the router answers, but no hand-off from prefill to decode succeeded lately",
            "see the workers and the reads in this list; `splitserve status` lists workers and their load",
        )
    else:
        yield topic.ok("ready: a hand-off succeeded lately")
