"""How do the other ranks of a worker end? With the engine of their leader, however that ends."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from cluster.wrapped_engine import WrappedEngine
from engine import Command
from engine.parallel.leader import LeaderRunner
from protocol.errors import EngineFault
from rpc import Engine

if TYPE_CHECKING:
    from cluster.ranks.group import Followers

END_S = 5.0
"""A follower that was told to stop ends within moments."""
LEAST_STOP_S = 1.0
"""To tell it so, even when the engine took all of the time."""

logger = logging.getLogger(__name__)


class LeadingEngine(WrappedEngine):
    """An `Engine` whose worker has other ranks, which end with it. Owns them."""

    def __init__(self, engine: Engine[Command], leader: LeaderRunner, followers: Followers) -> None:
        super().__init__(engine)
        self._leader = leader
        self._followers = followers

    def stop(self, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        try:
            super().stop(timeout_s)
        except EngineFault:
            self._leader.abort()  # a step hangs, and the others with it
            raise
        else:
            self._stop_followers(max(LEAST_STOP_S, until_s - time.monotonic()))
        finally:
            self._followers.end(min(END_S, max(0.0, until_s - time.monotonic())))

    def _stop_followers(self, limit_s: float) -> None:
        """One that does not answer is waited for no longer than that; the ranks' own limit is for steps."""
        too_late = threading.Timer(limit_s, self._leader.abort)
        too_late.start()
        try:
            self._leader.stop()
        except EngineFault as fault:
            logger.warning("a rank was gone before it was told to stop: %s", fault.message)
        finally:
            too_late.cancel()
