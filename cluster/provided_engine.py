"""How does an engine find memory under its blocks? Who provides it hears which ones are handed out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from cluster.wrapped_engine import WrappedEngine
from engine import BlocksAllocated, Command, Event
from kv_transfer import Provision
from rpc import Engine

OnEvents = Callable[[Sequence[Event]], None]


class ProvidedEngine(WrappedEngine):
    """An `Engine` with a `Provision` that lives as long as it runs. Owns both."""

    def __init__(
        self,
        make_engine: Callable[[OnEvents], Engine[Command]],
        provision: Provision,
        on_events: OnEvents,
    ) -> None:
        """`make_engine` gets the callback that hears the events before `on_events` does."""
        self._provision = provision
        self._on_events = on_events
        super().__init__(make_engine(self._hear))

    def start(self) -> None:
        super().start()
        self._provision.start()

    def stop(self, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        try:
            super().stop(timeout_s)
        finally:
            self._provision.stop(max(0.0, until_s - time.monotonic()))

    def _hear(self, events: Sequence[Event]) -> None:
        """On the engine's thread."""
        for event in events:
            if isinstance(event, BlocksAllocated):
                self._provision.use(event.block_ids)
        self._on_events(events)
