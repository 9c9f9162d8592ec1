"""Triton decides on import whether it interprets, so that each of the suites needs a process of its own."""

from __future__ import annotations

import os
from importlib.util import find_spec

SUITES = {"ahead_of_time", "interpreter"}
SUITE = "interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else "ahead_of_time"

collect_ignore = sorted(SUITES - {SUITE}) if find_spec("triton") else [*SUITES, "test_interpreter_suite.py"]
