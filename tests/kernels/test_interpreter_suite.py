"""The suite in `interpreter` within that of all tests: its process is one that interprets kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 1200


@pytest.mark.timeout(LIMIT_S + 30)
def test_kernels_compute_in_the_interpreter_what_they_should(pytestconfig: pytest.Config) -> None:
    """`make test-kernels ARGS="-k name"` runs some of it."""
    command = [sys.executable, "-m", "pytest", "-q", str(Path(__file__).with_name("interpreter"))]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command,
        env=own | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=pytestconfig.rootpath,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    if done.returncode:
        pytest.fail(f"exit code {done.returncode} of the suite:\n{done.stdout}", pytrace=False)
