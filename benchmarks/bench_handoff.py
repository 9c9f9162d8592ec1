"""How long does a hand-off take, and how fast do its bytes move? One line per figure: `name value unit`.

    make bench-handoff [ARGS="--only NAME --full --json FILE"]

Each benchmark has a file of its own that says what is measured. What is compared takes turns in one run,
so that a busy machine spoils the seconds but hardly the ratios. The machine's load when it begins and ends
is told: above the number of cores, read the figures of the best rounds. Takes up to five minutes.
`--only local_prefill` takes as long again: from which length on is a hand-off worth while?
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import handoff_time
import local_prefill
import transfer_rate
from figures import Figures, show, write_json
from rounds import Rounds

from cluster.environment import override

SHORT, LONG = 512, 4096
"""Prompt tokens."""
ON_DEMAND = ("local_prefill",)
"""Run only when they are named."""


def benchmarks(threads: int, *, full: bool) -> dict[str, Callable[[], Figures]]:
    """By name, in the order in which they run."""

    def rounds(most: int, budget_s: float) -> Rounds:
        """As many as fit into the time; they fit on a machine that does nothing else."""
        return Rounds(3 * most, 3 * budget_s) if full else Rounds(most, budget_s)

    return {
        "transfer_rate_short": lambda: transfer_rate.measure(SHORT, rounds(10, 5)),
        "transfer_rate_long": lambda: transfer_rate.measure(LONG, rounds(6, 10)),
        "handoff_blank_short": lambda: handoff_time.measure_blank(SHORT, rounds(20, 10)),
        "handoff_blank_long": lambda: handoff_time.measure_blank(LONG, rounds(6, 10)),
        "handoff_time_short": lambda: handoff_time.measure(SHORT, rounds(8, 40), threads),
        "handoff_time_long": lambda: handoff_time.measure(LONG, rounds(2, 60), threads),
        "local_prefill": lambda: local_prefill.measure(rounds(3, 60), threads),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this one; may be repeated")
    parser.add_argument("--full", action="store_true", help="more repeats, three times as long")
    parser.add_argument("--threads", type=int, default=1, help="threads of each engine")
    arguments = parser.parse_args()
    known = benchmarks(arguments.threads, full=arguments.full)
    names = arguments.only or [name for name in known if name not in ON_DEMAND]
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"no benchmark is called {', '.join(unknown)}: choose from {', '.join(known)}")
    override({"PYTHONPATH": os.pathsep.join(sys.path)})  # the workers are built by a module of this folder
    figures: Figures = {}
    for measure in (_load("start"), *(known[name] for name in names), _load("end")):
        measured = measure()
        show(measured)
        figures |= measured
        if arguments.json is not None:
            write_json(arguments.json, figures)


def _load(when: str) -> Callable[[], Figures]:
    """Processes that ran or wanted to, over the last minute."""
    cores = len(os.sched_getaffinity(0))
    return lambda: {f"load_at_{when}": (os.getloadavg()[0], f"runnable on {cores} cores")}


if __name__ == "__main__":
    main()
