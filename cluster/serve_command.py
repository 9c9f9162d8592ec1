"""`splitserve serve`: run a cluster until a signal ends it, and leave no process behind."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from cluster.background import Background
from cluster.config import ClusterConfig
from cluster.preflight import check_configuration, warnings_of
from cluster.process_tree import adopt_orphans, descendants, end_processes
from cluster.serve_port import with_free_port
from cluster.serve_progress import Report
from cluster.serve_run import FAREWELL_S, ClusterRun
from cluster.serve_signals import StopSignals

if TYPE_CHECKING:
    from cluster.application import Builders

INTERRUPTED_EXIT_CODE = 130
"""The start was interrupted, or the end was not waited for."""
TAKE_DOWN_S = FAREWELL_S + 5.0
NAP_S = 0.1
MAX_SWEEPS = 6


def serve_cluster(config: ClusterConfig, report: Report, builders: Builders | None = None) -> None:
    """Run a cluster until Ctrl-C or SIGTERM, then end this process. Must run on the main thread.

    Raises `StartupError` when it cannot be brought up, `WorkerUnavailable` when it is lost later.
    """
    check_configuration(config)
    config = with_free_port(config)
    signals = StopSignals()
    signals.install()
    adopt_orphans()
    report.headline(config)
    for line in warnings_of(config):
        report.step(line)
    run = ClusterRun(config, report, builders)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # Ray prints there what it logs, too
        thread = Background("cluster", run.run)
        _wait(thread, signals, num_signals=1)
        if signals.count:
            report.step("stopping")
            _mute_stderr()
            run.stop()
            _take_down(run, thread, signals)
            report.step("stopped")
        else:
            end_processes(descendants(), grace_s=2.0)
        if thread.is_running:
            run.take_word_back()  # over a dead Ray its thread may never get to that
        _finish(thread, forced=signals.count > 1, interrupted=bool(signals.count) and not run.was_ready)


def _mute_stderr() -> None:
    """Ray's C++ code complains there about everything that ends now, and nobody can help it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _take_down(run: ClusterRun, thread: Background[None], signals: StopSignals) -> None:
    """Politely where there is somebody to be polite to; a second signal ends all courtesy."""
    if run.is_up or not run.is_local:
        _wait(thread, signals, num_signals=2, timeout_s=TAKE_DOWN_S)
    for _ in range(MAX_SWEEPS):  # what is being started while we look is caught by the next look
        end_processes(descendants(), grace_s=0.0)
        if thread.wait(0.5) and not descendants():
            break


def _wait(
    thread: Background[None], signals: StopSignals, *, num_signals: int, timeout_s: float | None = None
) -> None:
    num_naps = 0
    while signals.count < num_signals and not thread.wait(NAP_S):
        signals.install()  # Ray's C++ code takes SIGTERM for itself some time while it connects
        num_naps += 1
        if timeout_s is not None and num_naps * NAP_S > timeout_s:
            return


def _finish(thread: Background[None], *, forced: bool, interrupted: bool) -> None:
    """Raise what the run raised; after a stop, leave without waiting for threads over a dead Ray."""
    if not thread.is_running and not forced:
        thread.raise_if_failed()
    os._exit(INTERRUPTED_EXIT_CODE if forced or interrupted else 0)
