"""Has a worker really nothing left? The leak check of every cluster that is not on Ray."""

from __future__ import annotations

from typing import Protocol

from protocol.errors import EngineFault
from protocol.membership import WorkerRecord


class CanBeIdle(Protocol):
    """A worker of either role, as far as its leak check goes."""

    def assert_idle(self) -> None: ...

    def record(self) -> WorkerRecord: ...


def assert_worker_idle(worker: CanBeIdle) -> None:
    """Raise `EngineFault` unless no request is anywhere in the worker and every KV block is free."""
    worker.assert_idle()
    load = worker.record().load
    if load.num_running or load.num_waiting or load.num_held or load.blocks_free < load.blocks_total:
        raise EngineFault(f"{worker.record().identity} still has work or blocks: {load}")
