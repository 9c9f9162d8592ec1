"""How is a timed read run from outside? Its two processes, their time limits, and what UCX logged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.background import Background
from cluster.doctor.read_plan import ReadPlan
from cluster.doctor.ucx_log import QUIETLY_TOLD, read_transport, ucx_version
from cluster.environment import with_variables
from protocol.errors import TransferFailed

START_LIMIT_S = 30.0
"""Loading NIXL takes a second; on a busy machine more."""
READ_LIMIT_S = 45.0
STOP_LIMIT_S = 2.0
MODULE = "cluster.doctor.read_agent"


@dataclass(frozen=True, slots=True)
class Measured:
    """What the reader says."""

    first_s: float
    seconds: float
    transport: str
    ucx_version: str


class OwnerProcess:
    """Owns blocks until it is stopped."""

    def __init__(self, plan: ReadPlan, variables: Mapping[str, str]) -> None:
        """Raises `TransferFailed` when it does not come up, with why."""
        self._process = _start("own", plan, variables)
        answer = Background("doctor: owner of blocks", self._first_line)
        if not answer.wait(START_LIMIT_S):
            self.stop()
            raise TransferFailed(f"NIXL did not start within {START_LIMIT_S:.0f} s")
        self.endpoint = answer.result()
        """A line for the reader's stdin."""
        if "endpoint" not in (said := _parse(self.endpoint)):
            self.stop()
            raise TransferFailed(str(said.get("error", "the process that owns the blocks died")))

    def _first_line(self) -> str:
        assert self._process.stdout is not None, "it was started with a pipe"  # noqa: S101
        return str(self._process.stdout.readline())

    def stop(self) -> None:
        """Its input ends, and so it goes; or it is killed. Idempotent."""
        assert self._process.stdin is not None, "it was started with a pipe"  # noqa: S101
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_LIMIT_S)
        self._process.kill()
        with self._process:  # closes what is open
            pass


def read_from(endpoint: str, plan: ReadPlan, variables: Mapping[str, str]) -> Measured:
    """Read from the owner of `endpoint`. Raises `TransferFailed`."""
    with tempfile.TemporaryDirectory(prefix="splitserve-doctor-") as folder:
        log = Path(folder) / "ucx.log"
        said = _said_by_reader(endpoint, plan, {**QUIETLY_TOLD, **variables, "UCX_LOG_FILE": str(log)})
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    answer = _parse(said)
    if "seconds" not in answer:
        raise TransferFailed(str(answer.get("error", "the reading process died")))
    return Measured(answer["first_s"], answer["seconds"], read_transport(text), ucx_version(text))


def _said_by_reader(endpoint: str, plan: ReadPlan, variables: Mapping[str, str]) -> str:
    with _start("read", plan, variables) as process:
        try:
            return process.communicate(endpoint, timeout=READ_LIMIT_S)[0]
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise TransferFailed(
                f"no read within {READ_LIMIT_S:.0f} s: no transport reaches the owner?"
            ) from error


def _start(role: str, plan: ReadPlan, variables: Mapping[str, str]) -> subprocess.Popen[str]:
    """With this process's own search path: it need not be in the environment."""
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, role, plan.to_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=with_variables({**path, **variables}),
        start_new_session=True,
    )


def _parse(text: str) -> dict[str, Any]:
    """The last line that is ours: libraries may print, too."""
    for line in reversed(text.splitlines()):
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {}
