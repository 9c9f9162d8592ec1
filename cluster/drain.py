"""`splitserve drain`: let one worker end its work, see that it is replaced, and tell how far it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocol.errors import NotFound, StartupError, WorkerUnavailable
from protocol.ids import WorkerIdentity
from protocol.membership import WorkerRecord
from protocol.ports import Clock

POLL_S = 0.5
REPLACE_S = 30.0
"""How long after its limit a worker may still be listed."""


@dataclass(frozen=True, slots=True)
class DrainTools:
    """What draining does to the world."""

    list_workers: Callable[[], Sequence[WorkerRecord]]
    tell: Callable[[str, float], None]
    """(address, limit_s): tells the worker."""
    say: Callable[[str], None]
    clock: Clock = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def drain_cluster_worker(
    token: str | None, worker: str, limit_s: float, say: Callable[[str], None]
) -> bool:
    """Drain one worker of the Ray cluster that this process has joined. See `drain`."""
    from cluster.admin import drain_worker
    from cluster.attachment import list_workers

    if token is None:
        raise StartupError(
            "workers ask for the cluster token: run this where `splitserve serve` runs, or set "
            "SPLITSERVE_CLUSTER_TOKEN to what the cluster was started with"
        )

    def tell(address: str, limit_s: float) -> None:
        asyncio.run(drain_worker(address, token, limit_s))

    return drain(worker, limit_s, DrainTools(list_workers, tell, say))


def drain(worker: str, limit_s: float, tools: DrainTools) -> bool:
    """Returns once the worker is gone: True; or REPLACE_S after its limit, if it is not: False.

    `worker` is its name or the beginning of it. Raises `NotFound`, or why it cannot be told.
    """
    target = choose(tools.list_workers(), worker)
    tools.tell(target.address, limit_s)
    tools.say(f"{target.identity}: takes no new work; what runs has {limit_s:g} s to end")
    started_at = tools.clock()
    said, was_busy = "", False
    while (now := tools.clock() - started_at) <= limit_s + REPLACE_S:
        record = _find(tools, target.identity)
        if record is None:
            handed_back = now > limit_s and was_busy
            tools.say(f"{now:.1f} s: gone" + (", what still ran was handed back" if handed_back else ""))
            return True
        progress = _progress(record)
        was_busy = _is_busy(record)
        if progress != said:
            tools.say(f"{now:.1f} s: {progress}")
            said = progress
        tools.sleep(POLL_S)
    tools.say(f"{target.identity} is still there {REPLACE_S:g} s after its limit: see its log, or kill it")
    return False


def choose(records: Sequence[WorkerRecord], worker: str) -> WorkerRecord:
    """The one worker that `worker` names. Raises `NotFound` when none does, or several do."""
    exact = [r for r in records if worker in (str(r.identity), r.identity.worker_id)]
    found = exact or [r for r in records if worker and str(r.identity).startswith(worker)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(str(record.identity) for record in (found or records)) or "none"
    if found:
        raise NotFound(f"{worker!r} begins the names of several workers: {names}; give more of it")
    raise NotFound(f"no worker's name begins with {worker!r}; those that live: {names}")


def _find(tools: DrainTools, identity: WorkerIdentity) -> WorkerRecord | None:
    try:
        records = tools.list_workers()
    except WorkerUnavailable as error:
        raise WorkerUnavailable(
            f"{identity} was told to drain, but the directory does not say how far it is: {error}"
        ) from error
    return next((record for record in records if record.identity == identity), None)


def _is_busy(record: WorkerRecord) -> bool:
    load = record.load
    return bool(load.num_running or load.num_waiting or load.num_held)


def _progress(record: WorkerRecord) -> str:
    load = record.load
    if not record.draining:
        return "has not begun"
    if not _is_busy(record):
        return "empty; it is being replaced"
    return f"{load.num_running} running, {load.num_waiting} waiting, {load.num_held} held"
