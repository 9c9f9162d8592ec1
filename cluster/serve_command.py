"""`splitserve serve`: run a cluster until a signal ends it, and leave no process behind."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from cluster.background import Background
from cluster.config import ClusterConfig
from cluster.processes import descendants, end_processes
from cluster.serve_port import with_free_port
from cluster.serve_progress import Report
from cluster.serve_run import FAREWELL_S, ClusterRun
from cluster.serve_signals import StopSignals

if TYPE_CHECKING:
    from cluster.application import Builders

FORCED_EXIT_CODE = 130
TAKE_DOWN_S = FAREWELL_S + 5.0
NAP_S = 0.1


def serve_cluster(config: ClusterConfig, report: Report, builders: Builders | None = None) -> None:
    """Run a cluster until Ctrl-C or SIGTERM. Must run on the main thread.

    Raises `StartupError` when it cannot be brought up, `WorkerUnavailable` when it is lost later.
    """
    config = with_free_port(config)
    signals = StopSignals()
    signals.install()
    report.headline(config)
    run = ClusterRun(config, report, builders)
    thread = Background("cluster", run.run)
    _wait(thread, signals, num_signals=1)
    if signals.count:
        report.step("stopping")
        run.stop()
        _take_down(run, thread, signals)
        report.step("stopped")
    else:
        end_processes(descendants(), grace_s=2.0)
    _finish(thread, forced=signals.count > 1)


def _take_down(run: ClusterRun, thread: Background[None], signals: StopSignals) -> None:
    """Politely where there is somebody to be polite to; a second signal ends all courtesy."""
    if run.is_up or not run.is_local:
        _wait(thread, signals, num_signals=2, timeout_s=TAKE_DOWN_S)
    for _ in range(3):  # one that is being started while we look is caught by the next look
        end_processes(descendants(), grace_s=0.0)
        if thread.wait(1.0):
            break


def _wait(
    thread: Background[None], signals: StopSignals, *, num_signals: int, timeout_s: float | None = None
) -> None:
    num_naps = 0
    while signals.count < num_signals and not thread.wait(NAP_S):
        num_naps += 1
        if timeout_s is not None and num_naps * NAP_S > timeout_s:
            return


def _finish(thread: Background[None], *, forced: bool) -> None:
    """Return normally when the run did; leave at once when its thread hangs over a dead Ray."""
    if thread.is_running or forced:
        sys.stdout.flush()
        os._exit(FORCED_EXIT_CODE if forced else 0)
    thread.raise_if_failed()
