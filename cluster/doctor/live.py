"""What runs already: its workers, its nodes, its service. Looked for in bounded time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from cluster.attachment import Attachment, find_cluster, list_workers
from cluster.background import Background
from cluster.config import ClusterConfig
from cluster.doctor.facts import Live, Service, WorkerAnswer
from cluster.doctor.node import Node
from cluster.doctor.service import probe_service
from cluster.doctor.workers import ask_workers
from cluster.serve_progress import public_url
from cluster.serve_state import read_start, read_state
from protocol.errors import SplitserveError, WorkerUnavailable

JOIN_LIMIT_S = 60.0
WORKERS_LIMIT_S = 15.0


@contextmanager
def look_at_cluster(config: ClusterConfig, url: str | None) -> Iterator[tuple[Live, list[Node]]]:
    """What runs, and its nodes; none where only this machine is meant. Stays connected meanwhile."""
    service = _service(config, url)
    if config.ray.address is None and read_state(config) is None:
        yield Live(service=service, is_starting=read_start(config) is not None), []
        return
    with ExitStack() as stack:
        try:
            attachment = find_cluster(config)
            _join(attachment, stack)
        except SplitserveError as error:
            yield Live(config.ray.address or "", service=service, problem=_why(error)), []
            return
        from cluster.doctor.ray_nodes import alive_nodes, lost_nodes

        nodes = alive_nodes(config) if config.ray.address is not None else []
        yield _ask(attachment, service, tuple(lost_nodes())), nodes


def _service(config: ClusterConfig, url: str | None) -> Service | None:
    """Asked when it was named, or when a server of this machine should answer."""
    if url is not None:
        return probe_service(url)
    return probe_service(public_url(config)) if read_state(config) else None


def _join(attachment: Attachment, stack: ExitStack) -> None:
    """Raises `WorkerUnavailable`; Ray itself may wait for minutes for a cluster that is gone."""
    logging.getLogger("ray._private.worker").setLevel(logging.ERROR)  # it wants the main thread
    joining = Background("doctor: join Ray", partial(stack.enter_context, attachment.joined()))
    if not joining.wait(JOIN_LIMIT_S):
        raise WorkerUnavailable(
            f"Ray at {attachment.ray_address} did not let us in within {JOIN_LIMIT_S:.0f} s"
        )
    joining.raise_if_failed()


def _ask(attachment: Attachment, service: Service | None, lost: tuple[str, ...]) -> Live:
    asking = Background("doctor: workers", partial(_workers, attachment.cluster_token))
    live = Live(attachment.ray_address, lost_nodes=lost, service=service)
    try:
        if not asking.wait(WORKERS_LIMIT_S):
            raise WorkerUnavailable(
                f"the directory and the workers did not answer within {WORKERS_LIMIT_S:.0f} s"
            )
        workers = asking.result()
    except SplitserveError as error:
        return replace(live, problem=error.message)
    return replace(live, workers=workers, knows_token=attachment.cluster_token is not None or not workers)


def _workers(token: str | None) -> tuple[WorkerAnswer, ...]:
    from cluster.ray_directory import has_directory

    if not has_directory():
        return ()  # nothing is deployed, and to ask the directory would make one
    records = list_workers()
    if token is None:
        return tuple(WorkerAnswer(record, None) for record in records)
    return asyncio.run(ask_workers(records, token))


def _why(error: SplitserveError) -> str:
    """With the first line of what Ray said, unless that is told already."""
    cause = error.__cause__
    if cause is None or isinstance(cause, OSError):
        return error.message
    said = str(cause).strip().splitlines()
    return f"{error.message}: {said[0]}" if said else error.message
