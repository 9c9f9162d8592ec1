"""Triton decides on import whether it interprets, so that each of the suites needs a process of its own."""

from __future__ import annotations

import os

collect_ignore = ["ahead_of_time" if os.environ.get("TRITON_INTERPRET") == "1" else "interpreter"]
