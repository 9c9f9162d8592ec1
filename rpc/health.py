"""Is this worker fit to serve? The first fault makes it unfit for good: it is replaced, not repaired."""

from __future__ import annotations

import logging
from collections.abc import Callable

from protocol.errors import EngineFault, SplitserveError, WorkerUnavailable

_log = logging.getLogger(__name__)


class Health:
    """Remembers the first fault and tells those who asked to know. Used on one event loop."""

    def __init__(self) -> None:
        self._fault: SplitserveError | None = None
        self._listeners: list[Callable[[SplitserveError], None]] = []

    @property
    def fault(self) -> SplitserveError | None:
        return self._fault

    def on_fault(self, listener: Callable[[SplitserveError], None]) -> None:
        """Call `listener` once, at the first fault."""
        self._listeners.append(listener)

    def report(self, fault: SplitserveError) -> None:
        """Declare the worker unfit. Later reports change nothing.

        `WorkerUnavailable` is no fault of its own: it was told to end its work, and has.
        """
        if self._fault is not None:
            return
        self._fault = fault
        level = logging.WARNING if isinstance(fault, WorkerUnavailable) else logging.ERROR
        _log.log(level, "this worker is unfit: %s", fault, exc_info=fault.__cause__)
        for listener in self._listeners:
            listener(fault)

    def check(self) -> None:
        """Raise `EngineFault` when the worker is unfit."""
        if self._fault is not None:
            raise EngineFault(self._fault.message) from self._fault
