"""The processes that descend from this one, and how they end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterable

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent_pid: int) -> None:
    """The kernel kills this process with the thread that started it, even while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it was gone before
        os._exit(1)


def adopt_orphans() -> None:
    """From now on, descendants whose parent dies become our children, so that none can be lost."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """All processes that descend from this one."""
    processes: list[psutil.Process] = psutil.Process().children(recursive=True)
    return processes


def end_processes(processes: Iterable[psutil.Process], grace_s: float) -> None:
    """Wait `grace_s` for processes to end by themselves, then kill the rest. Safe against pid reuse."""
    _, alive = psutil.wait_procs(list(processes), timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=2.0)
