"""`splitserve deploy` and `undeploy`: the application on a Ray cluster that runs already, and off it.

A second `deploy` is an update: replicas that the changed configuration does not concern run on (see
`deployment_version`), the others are replaced one by one, and end their work first.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import TYPE_CHECKING

from cluster.attachment import Attachment, find_cluster, list_workers
from cluster.background import Background
from cluster.cluster_token import cluster_token
from cluster.config import ClusterConfig
from cluster.preflight import check_configuration
from cluster.readiness import engines_in_words, wait_until_ready
from cluster.rendering import for_deployment
from cluster.serve_progress import Report, what_to_try
from cluster.serve_run import prepare_model
from cluster.serve_state import ServerState, read_start, read_state, state_file, write_deployment
from protocol.errors import StartupError, WorkerUnavailable
from protocol.ids import Role
from protocol.membership import WorkerRecord

if TYPE_CHECKING:
    from cluster.application import Builders

POLL_S = 0.5
NODES_S = 10.0
"""How long nodes may be on their way before that is worth a word."""
UNDEPLOY_S = 60.0
"""How long after the drain limit the application may still be there."""
EVERY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104
HOW_IT_ENDS = "splitserve undeploy takes it down"


def deploy_cluster(config: ClusterConfig, report: Report, builders: Builders | None = None) -> None:
    """Hand the application to the cluster, and return when it is ready. It runs on by itself.

    Raises `WorkerUnavailable` when there is no cluster, `StartupError` when the application cannot
    become ready. What ran before an update that failed goes on, as far as it had not been replaced.
    """
    config = for_deployment(config)
    check_configuration(config)
    _check_no_server_of_its_own(config)
    report.headline(config)
    for line in warnings_of_deployment(config):
        report.step(line)
    model = Background("model", partial(prepare_model, config))
    with _silence(), Attachment(str(config.ray.address), None).joined() as address:
        _hush_serve()
        report.step(f"Ray runs at {address}")
        report.step(f"the model is at {model.result()}")
        before = _hand_over(config, address, builders)
        report.step("the application is deployed" if before is None else "the update is under way")
        _wait(config, report, before)
    if config.http.host in EVERY_ADDRESS:
        report.step(f"other machines: http://{address.rpartition(':')[0]}:{config.http.port}/v1")
    report.block(what_to_try(config, HOW_IT_ENDS))


def undeploy_cluster(config: ClusterConfig, report: Report) -> None:
    """Take the application down; what runs may end within the drain limit. Does nothing if there is none.

    Raises `WorkerUnavailable` when there is no cluster, or the application is still there after all.
    """
    config = for_deployment(config)
    with _silence(), find_cluster(config).joined() as address:
        _hush_serve()
        from cluster.application import deployments

        if deployments():
            _take_down(config, report)
        else:
            report.step(f"nothing is deployed on the Ray cluster at {address}")
    if server_of_its_own(config) is None:
        state_file(config).unlink(missing_ok=True)


def server_of_its_own(config: ClusterConfig) -> ServerState | None:
    """The `splitserve serve` that runs or starts on this machine and port, whose word is not ours."""
    state = read_state(config) or read_start(config)
    return None if state is None or state.is_deployed else state


def warnings_of_deployment(config: ClusterConfig) -> list[str]:
    """What works, but not as one might wish."""
    if config.http.host in EVERY_ADDRESS and config.http.api_key_file is None:
        return ["no API key: whoever reaches this port may use the model; http.api_key_file asks for one"]
    return []


def missing_nodes(config: ClusterConfig, offered: Mapping[str, float]) -> list[str]:
    """Which workers no node of the Ray cluster has a place for; `offered` are its resources in all."""
    return [
        f"{role.value} waits for a node that offers {name}: `ray status` shows those that there are,"
        f" `ray start --resources='{{\"{name}\": {amount:g}}}'` starts one"
        for role in Role
        for name, amount in config.pool(role).resources.items()
        if offered.get(name, 0.0) < amount
    ]


def what_was_kept(before: Sequence[WorkerRecord], after: Sequence[WorkerRecord]) -> list[str]:
    """`prefill: 2 run on, 1 new`, for example; a line per role."""
    known = {record.identity for record in before}
    lines = []
    for role in Role:
        identities = [record.identity for record in after if record.role is role]
        num_kept = sum(identity in known for identity in identities)
        lines.append(f"{role.value}: {num_kept} run on, {len(identities) - num_kept} new")
    return lines


def _check_no_server_of_its_own(config: ClusterConfig) -> None:
    if (server := server_of_its_own(config)) is not None:
        raise StartupError(
            f"`splitserve serve` (pid {server.pid}) has port {config.http.port} of this machine: end it,"
            " or choose another --port"
        )


@contextmanager
def _silence() -> Iterator[None]:
    """Ray prints to stdout what it logs, too."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def _hush_serve() -> None:
    """Of Serve's log on this side only what is wrong is of interest."""
    from ray import serve  # noqa: F401  # its import sets the level, too

    logging.getLogger("ray.serve").setLevel(logging.WARNING)


def _hand_over(
    config: ClusterConfig, address: str, builders: Builders | None
) -> tuple[WorkerRecord, ...] | None:
    """The workers that ran before this; None when nothing was deployed."""
    from cluster.application import build_application, deploy, deployments, start_serve
    from cluster.ray_directory import create_directory

    token = cluster_token()
    start_serve(config)
    before = list_workers() if deployments() else None
    create_directory()
    deploy(build_application(config, token, builders))
    try:
        write_deployment(config, address, token)
    except OSError as error:
        raise StartupError(f"deployed, but `splitserve status` will not find it: {error}") from error
    return before


def _wait(config: ClusterConfig, report: Report, before: Sequence[WorkerRecord] | None) -> None:
    from cluster.application import is_settled

    wait_until_ready(config, report, _Nap(config, report), is_settled)
    workers = list_workers()
    for line in engines_in_words(workers):
        report.step(line)
    for line in what_was_kept(before, workers) if before is not None else ():
        report.step(line)


class _Nap:
    """Sleeps, and tells once which nodes are missing when they have had the time to join."""

    def __init__(self, config: ClusterConfig, report: Report) -> None:
        self._config = config
        self._report = report
        self._tell_at: float | None = time.monotonic() + NODES_S

    def __call__(self, seconds: float) -> None:
        import ray

        time.sleep(max(seconds, POLL_S))
        if self._tell_at is not None and time.monotonic() > self._tell_at:
            self._tell_at = None
            offered = ray.cluster_resources()  # type: ignore[no-untyped-call]
            for line in missing_nodes(self._config, offered):
                self._report.step(line)


def _take_down(config: ClusterConfig, report: Report) -> None:
    from cluster.application import begin_to_delete, deployments, end_empty_serve
    from cluster.ray_directory import remove_directory

    begin_to_delete()
    report.step(f"nothing new is accepted; what runs has {config.drain_limit_s:g} s to end")
    limit_s = config.drain_limit_s + UNDEPLOY_S
    started_at = time.monotonic()
    while left := sorted(deployments()):
        if time.monotonic() > started_at + limit_s:
            raise WorkerUnavailable(
                f"{', '.join(left)} still there after {limit_s:.0f} s: see `ray status`"
            )
        time.sleep(POLL_S)
    remove_directory()
    end_empty_serve()
    report.step("gone; the Ray cluster runs on")
