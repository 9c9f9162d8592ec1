"""How processes of a plain-process cluster are started: forked from a warm template."""

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
STOP_S = 5.0


class ForkLauncher:
    """Starts the template at once, which is warm some seconds later, and has it fork from then on."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """In a session of its own: a Ctrl-C is the caller's business. Raises `StartupError`."""
        try:
            self._template = subprocess.Popen(
                [sys.executable, "-m", "cluster.process_template", str(os.getpid())],
                stdin=subprocess.PIPE,
                env=with_variables({**variables, **ONE_THREAD}),
                start_new_session=True,
            )
        except OSError as error:
            raise StartupError(f"cannot start another Python: {error}") from error
        assert self._template.stdin is not None, "it was started with a pipe"  # noqa: S101
        self._stdin = self._template.stdin

    def launch(self, spec: ProcessSpec) -> None:
        """Have it forked; it connects to the control socket. Raises `StartupError`."""
        try:
            self._stdin.write(spec.to_line())
            self._stdin.flush()
        except OSError as error:
            raise StartupError(f"the template of all processes is gone: {error}") from error

    def stop(self) -> None:
        """End the template, and whatever it forked. Blocks for some seconds at most. Idempotent."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._template.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._template.kill()
            self._template.wait()
