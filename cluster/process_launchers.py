"""How processes of a plain-process cluster are started: forked from a warm template, or afresh."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping

from cluster.environment import with_variables
from cluster.process_spec import ProcessSpec
from protocol.errors import StartupError

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""While modules are loaded: a process with threads must not be forked. Engines set their own number."""
TEMPLATE_STOP_S = 5.0


class ForkLauncher:
    """Forks from one template process, which it starts at once and which is warm some seconds later."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._template = _start("cluster.process_template", {**variables, **ONE_THREAD}, ())

    def launch(self, spec: ProcessSpec) -> None:
        _tell(self._template, spec.to_line())

    def stop(self) -> None:
        """End the template, and whatever it forked. Blocks for some seconds at most."""
        _close_stdin(self._template)
        try:
            self._template.wait(TEMPLATE_STOP_S)
        except subprocess.TimeoutExpired:
            self._template.kill()
            self._template.wait()


class FreshLauncher:
    """Starts a new interpreter in a network namespace."""

    def __init__(self, netns: str, variables: Mapping[str, str]) -> None:
        self._prefix = ("ip", "netns", "exec", netns)
        self._variables = variables
        self._started: list[subprocess.Popen[bytes]] = []

    def launch(self, spec: ProcessSpec) -> None:
        self._started = [process for process in self._started if process.poll() is None]
        process = _start("cluster.process_main", self._variables, self._prefix)
        self._started.append(process)
        _tell(process, spec.to_line())
        _close_stdin(process)

    def stop(self) -> None:
        """End what still runs."""
        for process in self._started:
            process.kill()
            _close_stdin(process)
            process.wait()


def _start(module: str, variables: Mapping[str, str], prefix: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """In a session of its own: a Ctrl-C is the caller's business."""
    try:
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", module, str(os.getpid())],
            stdin=subprocess.PIPE,
            env=with_variables(variables),
            start_new_session=True,
        )
    except OSError as error:
        raise StartupError(f"cannot start {' '.join(prefix)} {module}: {error}") from error


def _tell(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None, "it was started with a pipe"  # noqa: S101
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except OSError as error:
        raise StartupError(f"the process that should start {process.args!r} is gone: {error}") from error


def _close_stdin(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None, "it was started with a pipe"  # noqa: S101
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
