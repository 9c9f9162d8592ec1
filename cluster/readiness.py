"""When is a deployed application ready? Tells what runs meanwhile, and why it never will."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from cluster.config import ClusterConfig
from cluster.serve_port import http_answers
from cluster.serve_progress import Report, public_url
from protocol.errors import StartupError
from protocol.ids import Role
from protocol.membership import WorkerRecord

POLL_S = 0.2
STATUS_PERIOD_S = 1.0
"""A look at Serve costs its controller 20 ms of CPU, which the replicas need just then."""
DEPLOYMENTS = frozenset({"router", *(role.value for role in Role)})


def wait_until_ready(
    config: ClusterConfig,
    report: Report,
    nap: Callable[[float], object],
    is_settled: Callable[[], bool] = lambda: True,
) -> None:
    """Return once a hand-off has succeeded, and nothing of an earlier configuration is left to replace.

    `nap` sleeps for some seconds, and raises when the wait is over for other reasons; `is_settled` says
    whether Serve has brought the application to where it shall be. Raises `StartupError` when the
    application cannot become ready, or did not within `start_timeout_s`.
    """
    started_at = looked_at = time.monotonic()
    told: set[str] = set()
    while not (http_answers(public_url(config), "/ready") and is_settled()):
        nap(POLL_S)
        if time.monotonic() > looked_at + STATUS_PERIOD_S:
            told |= _look(report, told)
            looked_at = time.monotonic()
        if time.monotonic() > started_at + config.start_timeout_s:
            raise StartupError(_too_slow(config, told))
    for name in sorted(DEPLOYMENTS - told):  # Serve's word comes late; the hand-off proves it
        report.step(f"{name} runs")
    report.step("ready: a hand-off from prefill to decode succeeded")


def engines_in_words(workers: Sequence[WorkerRecord]) -> list[str]:
    """`prefill: 2 x float32 by C++ avx2, 728 KV blocks of 16 tokens`, say; a line per kind of engine."""
    kinds = Counter(
        (w.role.value, w.fingerprint.dtype, w.ops, w.load.blocks_total, w.fingerprint.block_size)
        for w in workers
    )
    return [
        f"{role}: {number} x {dtype} by {ops}, {blocks:,} KV blocks of {size} tokens"
        for (role, dtype, ops, blocks, size), number in sorted(kinds.items(), reverse=True)
    ]


def _look(report: Report, told: set[str]) -> set[str]:
    """Tell which deployments run now. Raises `StartupError` when one never will."""
    from cluster.application import deployments, explain_failures, running

    seen = deployments()
    if problem := explain_failures(seen):
        raise StartupError(problem)
    news = running(seen) - told
    for name in sorted(news):
        report.step(f"{name} runs")
    return news


def _too_slow(config: ClusterConfig, running: set[str]) -> str:
    missing = sorted(DEPLOYMENTS - running)
    why = f"{', '.join(missing)} did not start" if missing else "no hand-off has succeeded"
    return (
        f"not ready after {config.start_timeout_s:.0f} s: {why}; raise start_timeout_s if the "
        "model needs longer to load, else see /tmp/ray/session_latest/logs/serve"
    )
