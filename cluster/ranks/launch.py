"""The seam for starting a worker's followers, and how it is done within one process: as threads."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from cluster.ranks.spec import RankSpec
from kv_transfer import LoopbackNetwork
from protocol.errors import SplitserveError

LOOPBACK = "127.0.0.1"

logger = logging.getLogger(__name__)


class RankHandle(Protocol):
    """One follower that was started."""

    @property
    def alive(self) -> bool: ...

    def end(self, grace_s: float) -> None:
        """Give it so long to end by itself, then end it where that is possible. Idempotent."""


class RankLauncher(Protocol):
    """Starts followers where a kind of cluster has them."""

    @property
    def host(self) -> str:
        """The leader's own address, as its followers reach it."""

    def launch(self, spec: RankSpec) -> RankHandle:
        """Returns at once. `spec.host` is what the leader's is; a launcher that knows better corrects it.

        Raises `StartupError`.
        """


class ThreadLauncher:
    """Followers as threads of this process, for clusters that live in one."""

    host = LOOPBACK

    def __init__(self, network: LoopbackNetwork | None = None) -> None:
        """`network` as for `create_transport`."""
        self._network = network

    def launch(self, spec: RankSpec) -> RankHandle:
        return RankThread(spec, self._network)


class RankThread:
    """A follower as a thread. Nothing can end it but its leader, or the leader's absence."""

    def __init__(self, spec: RankSpec, network: LoopbackNetwork | None) -> None:
        self._spec = spec
        self._network = network
        self._thread = threading.Thread(
            target=self._run, name=f"{spec.identity}/rank{spec.rank}", daemon=True
        )
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def end(self, grace_s: float) -> None:
        self._thread.join(grace_s)
        if self._thread.is_alive():
            logger.error("%s did not end within %g s", self._thread.name, grace_s)

    def _run(self) -> None:
        from cluster.ranks.follower import follow

        try:
            follow(self._spec, self._network)
        except SplitserveError as error:  # its leader has been told, or is gone
            logger.info("%s ended: %s", self._thread.name, error.message)
        except Exception:  # nothing is above a thread: its leader has been told, its log shall say where
            logger.exception("%s broke", self._thread.name)
