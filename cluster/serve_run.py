"""One run of a cluster: bring it up, watch it, take it down. On a thread of its own.

1. Ray, beside it the model and the imports   2. Serve, directory, application
3. wait until a hand-off between a pair of workers succeeded   4. watch until told to stop
5. farewell of the replicas, then Ray
"""

from __future__ import annotations

import logging
import secrets
import threading
from functools import partial
from typing import TYPE_CHECKING

from cluster.attachment import list_workers
from cluster.background import Background
from cluster.config import ClusterConfig
from cluster.environment import export, forget, local_ray_variables, read_environment, use_ray_token
from cluster.readiness import engines_in_words, wait_until_ready
from cluster.serve_progress import Report, what_to_try
from cluster.serve_state import state_file, write_start, write_state
from protocol.errors import StartupError, WorkerUnavailable

if TYPE_CHECKING:
    from cluster.application import Builders
    from cluster.launcher import RayCluster

FAREWELL_S = 8.0
"""How long the replicas may take to end by themselves."""
MODEL_WAIT_S = 3.0


class StopRequested(Exception):
    """Ends a run that was told to stop before it was ready."""


class ClusterRun:
    """`run` does everything, in the calling thread, and leaves nothing behind when it returns.

    The thread must live as long as the cluster does: Linux ends a child process with the thread that
    started it. Ray runs here and not on the main thread, so that signals are always heard.
    """

    def __init__(self, config: ClusterConfig, report: Report, builders: Builders | None = None) -> None:
        self._config = config
        self._report = report
        self._builders = builders
        self._stop = threading.Event()
        self.is_up = False
        """Replicas may be running: they deserve a farewell."""
        self.was_ready = False
        """The start has succeeded: what ends the run now interrupts nothing."""

    @property
    def is_local(self) -> bool:
        """Ray itself was started by this run."""
        return self._config.ray.address is None

    def stop(self) -> None:
        """Ask `run` to take the cluster down. From any thread."""
        self._stop.set()

    def run(self) -> None:
        """Raises `StartupError` or, when the cluster is lost later, `WorkerUnavailable`."""
        token = read_environment().cluster_token or secrets.token_hex(32)
        self._leave_word()
        try:
            self._run(token)
        finally:
            self.take_word_back()

    def take_word_back(self) -> None:
        """Remove the file by which other commands find this server. Idempotent."""
        state_file(self._config).unlink(missing_ok=True)

    def _leave_word(self) -> None:
        try:
            write_start(self._config)
        except OSError as error:
            raise StartupError(
                f"cannot leave word of this server for `splitserve status`: {error}; set XDG_CACHE_HOME to"
                " a folder where files can be written"
            ) from error

    def _run(self, token: str) -> None:
        cluster = self._start_ray()
        try:
            self._deploy(token)
            self._wait_until_ready()
            self._serve(cluster, token)
        except StopRequested:
            return
        finally:
            if self.is_up:
                self._say_farewell()
            cluster.stop()

    def _start_ray(self) -> RayCluster:
        model = Background("model", partial(prepare_model, self._config))
        if not self.is_local:
            use_ray_token()
        else:
            export(local_ray_variables(secrets.token_hex(32)))
        forget(("SPLITSERVE_CLUSTER_TOKEN",))  # replicas get it with the application, not from here
        from cluster import launcher

        imports = Background("imports", _import_application)
        model.wait(MODEL_WAIT_S)  # what cannot work is known by then, unless it is converted or downloaded
        model.raise_if_failed()
        cluster = launcher.connect(self._config)
        try:
            where = "on this machine" if self.is_local else f"at {cluster.address}"
            self._report.step(f"Ray runs {where}")
            imports.result()
            self._report.step(f"the model is at {model.result()}")
        except BaseException:
            cluster.stop()
            raise
        return cluster

    def _deploy(self, token: str) -> None:
        from cluster.application import build_application, deploy, start_serve
        from cluster.ray_directory import create_directory

        self._check_stop()
        create_directory()
        start_serve(self._config)
        self._check_stop()
        self.is_up = True
        deploy(build_application(self._config, token, self._builders))
        self._report.step("the application is deployed")

    def _wait_until_ready(self) -> None:
        wait_until_ready(self._config, self._report, self._nap)
        self.was_ready = True

    def _nap(self, seconds: float) -> None:
        self._stop.wait(seconds)
        self._check_stop()

    def _serve(self, cluster: RayCluster, token: str) -> None:
        ray_token = read_environment().ray_token or ""
        write_state(self._config, cluster.address, ray_token=ray_token, cluster_token=token)
        try:
            lines = engines_in_words(list_workers())
        except WorkerUnavailable as error:  # the service works all the same
            lines = [error.message]
        for line in lines:
            self._report.step(line)
        self._report.step(f"logs: {cluster.log_dir}/serve")
        self._report.block(what_to_try(self._config))
        while not self._stop.wait(1.0):
            if not cluster.is_alive():
                raise WorkerUnavailable(f"Ray ended unexpectedly; see {cluster.log_dir}")

    def _say_farewell(self) -> None:
        """Let the replicas release leases and withdraw. A local Serve ends with Ray."""
        from cluster.application import delete

        Background("farewell", partial(delete, with_serve=not self.is_local)).wait(FAREWELL_S)

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise StopRequested


def prepare_model(config: ClusterConfig) -> str:
    """Find, download or convert the model, so that all replicas find it done; check what can be checked."""
    from cluster.compose import open_model
    from cluster.preflight import check_before_start
    from engine.weights import console_progress

    folder = open_model(config, console_progress())
    check_before_start(config, folder)
    return str(folder.path)


def _import_application() -> None:
    import cluster.application
    import cluster.ray_directory  # noqa: F401

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
