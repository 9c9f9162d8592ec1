"""How does a probe run another program, for a bounded time?"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence

from protocol.errors import StartupError

COMMAND_LIMIT_S = 10.0

Run = Callable[[Sequence[str]], str | None]
"""From a command line to what it prints; None when there is no such program."""


def run_command(command: Sequence[str]) -> str | None:
    """Raises `StartupError` when it fails, or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            list(command), capture_output=True, text=True, check=False, timeout=COMMAND_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise StartupError(f"{command[0]} did not answer within {COMMAND_LIMIT_S:.0f} s") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise StartupError(f"{command[0]} failed: {said[0] if said else f'exit code {done.returncode}'}")
    return done.stdout
