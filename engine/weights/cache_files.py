"""How do many processes that start at once agree on who writes a file of a cache?"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.errors import StartupError
from protocol.ports import Clock

_LOCK_WAIT_S = 3600.0
_LOCK_POLL_S = 0.1


@contextmanager
def locked(file: Path, *, clock: Clock = time.monotonic) -> Iterator[None]:
    """Hold a lock that dies with its process.

    Raises `StartupError` when another process keeps it for too long.
    """
    deadline_s = clock() + _LOCK_WAIT_S
    with file.open("w") as stream:
        while not _try_lock(stream.fileno()):
            if clock() > deadline_s:
                raise StartupError(f"another process holds {file} for {_LOCK_WAIT_S:.0f} s: end it")
            time.sleep(_LOCK_POLL_S)
        yield


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sync(file: Path) -> None:
    """Return when the file or folder is on disk."""
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
