"""Followers as child processes that were forked before there was a thread, and wait until they are needed.

fork ──> wait for a line ──spec──> follow ──> exit 0, or 1 when it failed
                  \\──the parent ends──> killed by the kernel, whatever they do
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable

from cluster.ranks.launch import RankHandle
from cluster.ranks.spec import RankSpec
from protocol.errors import StartupError

POLL_S = 0.02

logger = logging.getLogger(__name__)


class ForkedLauncher:
    """Hands out children that `fork` made, one for each rank but the leader. Used by one thread."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._waiting: list[ForkedRank] = []

    @property
    def host(self) -> str:
        return self._host

    def fork(self, number: int, be_child: Callable[[RankSpec], None]) -> None:
        """Make so many. In a process without threads. `be_child` is all that a child does, once it is told
        what."""
        parent_pid = os.getpid()
        for _ in range(number):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(writer)
                _be_child(reader, parent_pid, be_child)
            os.close(reader)
            self._waiting.append(ForkedRank(pid, writer))

    def launch(self, spec: RankSpec) -> RankHandle:
        if not self._waiting:
            raise StartupError(f"no process was kept for rank {spec.rank}")
        rank = self._waiting.pop(0)
        rank.begin(spec)
        return rank


class ForkedRank:
    """One such child. Used by one thread at a time."""

    def __init__(self, pid: int, writer: int) -> None:
        self._pid = pid
        self._writer = writer
        self._has_ended = False

    def begin(self, spec: RankSpec) -> None:
        """Raises `StartupError` when it is gone."""
        try:
            with os.fdopen(self._writer, "wb") as stream:
                stream.write(spec.to_line())
        except BrokenPipeError as error:
            raise StartupError(f"the process of rank {spec.rank} ended before it was needed") from error

    @property
    def alive(self) -> bool:
        if not self._has_ended:
            self._has_ended = os.waitpid(self._pid, os.WNOHANG)[0] == self._pid
        return not self._has_ended

    def end(self, grace_s: float) -> None:
        until_s = time.monotonic() + grace_s
        while self.alive and time.monotonic() < until_s:
            time.sleep(POLL_S)
        if self.alive:
            logger.warning("rank process %d did not end within %g s: it is killed", self._pid, grace_s)
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._has_ended = True


def _be_child(reader: int, parent_pid: int, be_child: Callable[[RankSpec], None]) -> None:
    from cluster.process_tree import die_with_parent

    code = 1
    try:
        die_with_parent(parent_pid)
        with os.fdopen(reader, "rb") as stream:
            line = stream.readline()
        if line:
            be_child(RankSpec.from_line(line))
        code = 0
    except Exception:  # into its log, whatever it is; its leader has been told, or is gone
        logger.exception("a rank ended")
    finally:
        os._exit(code)
