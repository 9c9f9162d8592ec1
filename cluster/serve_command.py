"""`splitserve serve`: bring a cluster up, say so, and end all of it on Ctrl-C.

1. port free?   2. Ray, beside it the model and the imports   3. Serve, directory, application
4. wait until a hand-off between a pair of workers succeeded   5. wait for a signal   6. end everything
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from cluster.config import ClusterConfig
from cluster.environment import export, forget, local_ray_variables, read_environment
from cluster.serve_port import http_answers, with_free_port
from cluster.serve_progress import Report, public_url, what_to_try
from cluster.serve_signals import StopRequested, StopSignals
from cluster.serve_state import write_state
from protocol.errors import StartupError, WorkerUnavailable

if TYPE_CHECKING:
    from cluster.application import Builders
    from cluster.launcher import RayCluster

T = TypeVar("T")

FAREWELL_S = 8.0
"""How long the replicas may take to end by themselves."""
POLL_S = 0.2


def serve_cluster(config: ClusterConfig, report: Report, builders: Builders | None = None) -> None:
    """Run a cluster until a signal ends it. Must run on the main thread.

    Raises `StartupError` when it cannot be brought up, `WorkerUnavailable` when it is lost later; in
    both cases nothing that it started is left.
    """
    config = with_free_port(config)
    token = read_environment().cluster_token or secrets.token_hex(32)
    signals = StopSignals()
    signals.install()
    report.headline(config)
    try:
        with _ray(config, report, signals) as cluster:
            _deploy(config, token, report, builders)
            _wait_until_ready(config, report)
            state = write_state(config, cluster.address, read_environment().ray_token or "")
            try:
                report.box(what_to_try(config))
                _watch(cluster)
            finally:
                state.unlink(missing_ok=True)
                _end_application()
    except StopRequested:
        report.step("stopped")


@contextmanager
def _ray(config: ClusterConfig, report: Report, signals: StopSignals) -> Iterator[RayCluster]:
    """Ray with the model at hand and our modules imported; all of it is ended on the way out."""
    model = _Background("model", partial(_prepare_model, config))
    if config.ray.address is None:
        export(local_ray_variables(secrets.token_hex(32)))
    forget(("SPLITSERVE_CLUSTER_TOKEN",))  # workers get it through the application, not from here
    from cluster import launcher

    imports = _Background("imports", _import_application)
    cluster: RayCluster | None = None
    try:
        cluster = launcher.connect(config)
        signals.install()  # Ray took SIGTERM for itself
        report.step(f"Ray is up ({'local' if config.ray.address is None else cluster.address})")
        imports.result()
        report.step(f"model is ready: {model.result()}")
        yield cluster
    except StopRequested:
        report.step("stopping")
        raise
    finally:
        remaining = launcher.descendants() if config.ray.address is None else []
        signals.stopping(force=partial(launcher.end_processes, remaining, grace_s=0.0))
        if cluster is not None:
            cluster.stop()
        launcher.end_processes(remaining, grace_s=2.0)


def _prepare_model(config: ClusterConfig) -> str:
    """Find, download or convert the model, so that all replicas find it done."""
    from cluster.compose import open_model
    from engine.weights import console_progress

    return str(open_model(config, console_progress()).path)


def _import_application() -> None:
    import cluster.application
    import cluster.ray_directory  # noqa: F401


def _deploy(config: ClusterConfig, token: str, report: Report, builders: Builders | None) -> None:
    from cluster.application import build_application, deploy, start_serve
    from cluster.ray_directory import create_directory

    create_directory()
    start_serve(config)
    deploy(build_application(config, token, builders))
    report.step("the application is deployed")


def _wait_until_ready(config: ClusterConfig, report: Report) -> None:
    from cluster.application import find_startup_error, running_deployments

    deadline = time.monotonic() + config.start_timeout_s
    told: set[str] = set()
    while not http_answers(public_url(config), "/ready"):
        if problem := find_startup_error():
            raise StartupError(problem)
        for name in sorted(running_deployments() - told):
            report.step(f"{name} runs")
            told.add(name)
        if time.monotonic() > deadline:
            raise StartupError(
                f"not ready after {config.start_timeout_s:.0f} s: {_what_is_missing(told)}; raise "
                "start_timeout_s if the model needs longer to load"
            )
        time.sleep(POLL_S)
    report.step("ready: a hand-off from prefill to decode succeeded")


def _what_is_missing(running: set[str]) -> str:
    missing = {"router", "prefill", "decode"} - running
    return f"{', '.join(sorted(missing))} did not start" if missing else "no hand-off has succeeded"


def _watch(cluster: RayCluster) -> None:
    """Return never; a signal raises `StopRequested`."""
    while cluster.is_alive():
        time.sleep(1.0)
    raise WorkerUnavailable("Ray ended unexpectedly; its logs are in /tmp/ray/session_latest/logs")


def _end_application() -> None:
    """Let the replicas say farewell: leases are released, workers withdraw."""
    from cluster.application import delete

    farewell = _Background("farewell", delete)
    farewell.wait(FAREWELL_S)


class _Background(Generic[T]):
    """A call on a thread that never keeps the process alive."""

    def __init__(self, name: str, call: Callable[[], T]) -> None:
        self._call = call
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value.append(self._call())
        except BaseException as error:  # handed to the caller of `result`
            self._error = error

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def result(self) -> T:
        """Wait for the value; short naps, so that signals get through. Raises what the call raised."""
        while self._thread.is_alive():
            self._thread.join(0.1)
        if self._error is not None:
            raise self._error
        return self._value[0]
