"""How does a running process move into a network namespace? As `ip netns exec` does it, by system calls.

A fork of a warm process is there at once, while a program started by `ip netns exec` loads everything anew.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from protocol.errors import StartupError

NAMESPACES = Path("/run/netns")

_CLONE_NEWNS = 0x00020000
_CLONE_NEWNET = 0x40000000
_MS_REC_SLAVE = 0x4000 | 0x80000
_MNT_DETACH = 2


def enter_netns(name: str) -> None:
    """For a process with one thread. Needs root. Raises `StartupError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        namespace = os.open(NAMESPACES / name, os.O_RDONLY | os.O_CLOEXEC)
        _check(libc.setns(namespace, _CLONE_NEWNET))
        os.close(namespace)
        # /sys shows the network devices of the namespace that it was mounted in, and UCX looks there.
        _check(libc.unshare(_CLONE_NEWNS))
        _check(libc.mount(b"none", b"/", None, _MS_REC_SLAVE, None))
        _check(libc.umount2(b"/sys", _MNT_DETACH))
        _check(libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None))
    except OSError as error:
        raise StartupError(f"cannot enter the network namespace {name!r}: {error}") from error


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
