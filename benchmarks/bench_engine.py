"""How good are the engine's scheduling and memory? One line per figure: `name value unit`.

    make bench-engine [ARGS="--only NAME --full --json FILE"]

Each benchmark has a file of its own that says what is measured. What is compared takes turns in one run,
so that a busy machine spoils the seconds but hardly the ratios.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache
from pathlib import Path

import chunked_itl
import continuous_vs_static
import preemption
import scheduler_cost
import shared_prefix_ttft
import trace_replay
from demo_engine import DemoEngine
from figures import Figures, show, write_json


def benchmarks(threads: int, *, full: bool) -> dict[str, Callable[[], Figures]]:
    """By name, in the order in which they run; the model is loaded by the first one that needs it."""

    @cache
    def demo() -> DemoEngine:
        return DemoEngine.load(threads)

    return {
        "trace_replay": trace_replay.measure,
        "scheduler_cost": lambda: scheduler_cost.measure(num_steps=400),
        "shared_prefix_ttft": lambda: shared_prefix_ttft.measure(demo(), uncached_every=1 if full else 7),
        "chunked_itl": lambda: chunked_itl.measure(demo(), budgets=(256, 512) if full else (512,)),
        "continuous_vs_static": lambda: continuous_vs_static.measure(demo(), num_rounds=5 if full else 3),
        "preemption": lambda: preemption.measure(demo(), num_rounds=5 if full else 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this one; may be repeated")
    parser.add_argument("--full", action="store_true", help="more repeats, several times as long")
    parser.add_argument("--threads", type=int, default=2, help="threads of the model's engine")
    arguments = parser.parse_args()
    known = benchmarks(arguments.threads, full=arguments.full)
    names = arguments.only or list(known)
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"no benchmark is called {', '.join(unknown)}: choose from {', '.join(known)}")
    figures: Figures = {}
    for name in names:
        measured = known[name]()
        show(measured)
        figures |= measured
        if arguments.json is not None:
            write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
