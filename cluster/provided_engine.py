"""How does an engine find memory under its blocks? Who provides it hears which ones are handed out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from engine import BlocksAllocated, Command, Event
from kv_transfer import Provision
from protocol.errors import SplitserveError
from rpc import Engine, EngineStats

OnEvents = Callable[[Sequence[Event]], None]


class ProvidedEngine:
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
        self._engine = make_engine(self._hear)

    @property
    def alive(self) -> bool:
        return self._engine.alive

    @property
    def fault(self) -> SplitserveError | None:
        return self._engine.fault

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def progress(self) -> int:
        return self._engine.progress

    def start(self) -> None:
        self._engine.start()
        self._provision.start()

    def post(self, command: Command) -> None:
        self._engine.post(command)

    def stop(self, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        try:
            self._engine.stop(timeout_s)
        finally:
            self._provision.stop(max(0.0, until_s - time.monotonic()))

    def _hear(self, events: Sequence[Event]) -> None:
        """On the engine's thread."""
        for event in events:
            if isinstance(event, BlocksAllocated):
                self._provision.use(event.block_ids)
        self._on_events(events)
