"""How long does a hand-off take, and how fast do its bytes move? One line per figure: `name value unit`.

    make bench-handoff [ARGS="--only NAME --full --json FILE"]

Each benchmark has a file of its own that says what is measured. What is compared takes turns in one run,
so that a busy machine spoils the seconds but hardly the ratios.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import handoff_time
import transfer_rate
from figures import Figures, show, write_json

from cluster.environment import override

SHORT, LONG = 512, 4096
"""Prompt tokens."""


def benchmarks(threads: int, *, full: bool) -> dict[str, Callable[[], Figures]]:
    """By name, in the order in which they run."""
    num_rounds = 7 if full else 3
    return {
        "transfer_rate_short": lambda: transfer_rate.measure(SHORT, 5 * num_rounds),
        "transfer_rate_long": lambda: transfer_rate.measure(LONG, 2 * num_rounds),
        "handoff_blank_short": lambda: handoff_time.measure_blank(SHORT, 5 * num_rounds),
        "handoff_blank_long": lambda: handoff_time.measure_blank(LONG, num_rounds),
        "handoff_time_short": lambda: handoff_time.measure(SHORT, 3 * num_rounds, threads),
        "handoff_time_long": lambda: handoff_time.measure(LONG, num_rounds, threads),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this one; may be repeated")
    parser.add_argument("--full", action="store_true", help="more repeats, more than twice as long")
    parser.add_argument("--threads", type=int, default=1, help="threads of each engine")
    arguments = parser.parse_args()
    known = benchmarks(arguments.threads, full=arguments.full)
    names = arguments.only or list(known)
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"no benchmark is called {', '.join(unknown)}: choose from {', '.join(known)}")
    override({"PYTHONPATH": os.pathsep.join(sys.path)})  # the workers are built by a module of this folder
    figures: Figures = {}
    for name in names:
        measured = known[name]()
        show(measured)
        figures |= measured
        if arguments.json is not None:
            write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
