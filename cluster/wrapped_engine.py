"""An engine around another one: what a wrapper does not say anew is that one's."""

from __future__ import annotations

from engine import Command
from protocol.errors import SplitserveError
from rpc import Engine, EngineStats


class WrappedEngine:
    """Implements `Engine` by another one, which it owns: for those that have more to start or to stop."""

    def __init__(self, engine: Engine[Command]) -> None:
        self._engine = engine

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

    def post(self, command: Command) -> None:
        self._engine.post(command)

    def stop(self, timeout_s: float) -> None:
        self._engine.stop(timeout_s)
