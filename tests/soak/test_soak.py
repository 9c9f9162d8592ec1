"""The soak passes, and it can fail. `make soak` runs it for as long as one likes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).with_name("soak.py")
ROOT = SOAK.parents[2]


def run_soak(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SOAK, "--folder", folder, "--seconds", "60", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.soak
@pytest.mark.nixl
@pytest.mark.timeout(500)
def test_a_cluster_under_fire_gives_right_answers_and_loses_nothing(tmp_path: Path) -> None:
    """At least twenty faults within a minute; every answer is a lone engine's, and no block is left."""
    done = run_soak(tmp_path, "--fault-every", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("soak: passed: ")


@pytest.mark.soak
@pytest.mark.nixl
@pytest.mark.timeout(500)
def test_without_validation_the_soak_fails(tmp_path: Path) -> None:
    """Decode workers that believe in KV whose lease has lapsed give wrong tokens, and the soak sees it."""
    done = run_soak(tmp_path, "--without-validation")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG: case " in done.stdout
