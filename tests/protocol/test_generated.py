"""The generated Python of the wire's messages belongs to the .proto that lies beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_generated_protocol_is_fresh() -> None:
    """A stale one would speak another wire than its .proto says."""
    check = subprocess.run(
        [ROOT / "scripts" / "generate_protocol", "--check"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stderr
