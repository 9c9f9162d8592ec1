"""How do the other ranks of a worker end? With the engine of their leader, however that ends."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from engine import Command
from engine.parallel.leader import LeaderRunner
from protocol.errors import EngineFault, SplitserveError
from rpc import Engine, EngineStats

if TYPE_CHECKING:
    from cluster.ranks.group import Followers

END_S = 5.0
"""A follower that was told to stop ends within moments."""

logger = logging.getLogger(__name__)


class LeadingEngine:
    """An `Engine` whose worker has other ranks, which end with it. Owns them."""

    def __init__(self, engine: Engine[Command], leader: LeaderRunner, followers: Followers) -> None:
        self._engine = engine
        self._leader = leader
        self._followers = followers

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
        until_s = time.monotonic() + timeout_s
        try:
            self._engine.stop(timeout_s)
        except EngineFault:
            self._leader.abort()  # a step hangs, and the others with it
            raise
        else:
            self._stop_followers()
        finally:
            self._followers.end(min(END_S, max(0.0, until_s - time.monotonic())))

    def _stop_followers(self) -> None:
        try:
            self._leader.stop()
        except EngineFault as fault:
            logger.warning("a rank was gone before it was told to stop: %s", fault.message)
