"""How near are the CPU's limits? One line per figure: `name value unit`.

    make bench-cpu [ARGS="--seconds 400 --busy --threads 2 --json FILE"]

The demo model in bfloat16. The machine's limits, the model's bare steps, the same steps through the engine
and transformers' take turns until the time is up. Figures are medians, `_best` ones the best of all turns.
A step's share of the roofline is that of the limits measured just before and after it (the better of
both): a machine that is shared with others changes its speed from second to second.

On a machine with other work, `--busy` takes CPU time in place of the wall's, and one thread: it says what
that thread would take alone, but for caches and memory that it shares. Two engines are left out then.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from cpu_engine import MAX_STEPS, Decoding, DemoModel, Prefilling, Step, engine_of, make_ops
from cpu_limits import Machine, Roofline, build_library, no_math_ops
from cpu_overhead import frame_s, sampling_figures, text_s
from cpu_pair import Pair
from cpu_transformers import KINDS, Peer
from figures import Figures, show, write_json

from cluster.compose import open_model
from cluster.config import ClusterConfig
from engine.model import ModelConfig
from engine.weights import demo_model_path
from protocol.ports import Clock

QUICK_STEPS = (
    Step("prefill_1x512", 1, 512),
    *(Step(f"decode_{batch}", batch) for batch in (1, 8, 16, 32, 64)),
    Step("decode_8_at_4096", 8, context=4096),
    Step("chunk_256_at_2048", 1, 256, context=2048 + 256),
)
LONG_STEPS = (Step("prefill_4x512", 4, 512), Step("prefill_1x2048", 1, 2048, context=2048))
STEPS = {step.name: step for step in (*QUICK_STEPS, *LONG_STEPS)}
LONG_EVERY = 4
"""Rounds from one turn of the long steps, and of transformers, to the next."""
MIN_ROUNDS, MAX_ROUNDS = 3, MAX_STEPS // 11  # of so many decode steps of one sequence
PEER_BATCHES = (1, 32)
PAIR_ROUNDS = 5
SCATTERED_BYTES = 12288
"""What lies together in a block: the keys and values of one layer."""


class Limits(NamedTuple):
    """What the machine reached in one sample."""

    multiply: float
    product: float
    read: float
    read_scattered: float


def best(limits: list[Limits]) -> Limits:
    return Limits(*map(max, zip(*limits, strict=True)))


def roofline(limits: list[Limits], config: ModelConfig) -> Roofline:
    return Roofline(best(limits).product, best(limits).read, config, itemsize=2)


@dataclass
class Samples:
    """Seconds of each kind of step, and the machine's limits around it, in the order in which they were
    taken.
    """

    limits: list[Limits] = field(default_factory=list)
    of_limits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Shares of what the machine could do at that moment: its speed changes with what its neighbours do."""
    model_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    engine_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    peer_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def take_limits(self, machine: Machine) -> None:
        read, scattered = machine.read(), machine.read(SCATTERED_BYTES)
        self.limits.append(Limits(machine.multiply(), machine.best_product(), read, scattered))

    def take(self, step: Step, machine: Machine, demo: DemoModel, engine: Decoding | Prefilling) -> None:
        """Model and engine take turns, short steps more often: their times belong together in pairs."""
        name, first = step.name, len(self.model_s[step.name])
        if not self.limits:
            self.take_limits(machine)
        for _ in range(1 if step.num_tokens > 1 else 2 + 8 // step.num_sequences):
            self.model_s[name].append(demo.step_s(step))
            self.engine_s[name].append(engine.step_s())
        self.take_limits(machine)
        least_s = roofline(self.limits[-2:], demo.config).step_s(step)
        self.of_limits[name] += [least_s / taken_s for taken_s in self.model_s[name][first:]]

    def take_peer(self, kind: str, peer: Peer) -> None:
        self.peer_s[f"prefill_1x512/{kind}"].append(peer.prefill_s())
        for batch in PEER_BATCHES:
            self.peer_s[f"decode_{batch}/{kind}"] += peer.decode_s(batch)


def limit_figures(samples: Samples) -> Figures:
    units = ("GFLOP/s", "GFLOP/s", "GB/s", "GB/s")
    figures: Figures = {}
    for name, values, unit in zip(Limits._fields, zip(*samples.limits, strict=True), units, strict=True):
        figures[f"limit_{name}"] = median(values) / 1e9, unit
        figures[f"limit_{name}_best"] = max(values) / 1e9, unit
    return figures


def step_figures(samples: Samples, config: ModelConfig) -> Figures:
    """Each step's speed, its share of the roofline, and what the engine adds."""
    limits = roofline(samples.limits, config)
    figures: Figures = {}
    for name, times in samples.model_s.items():
        step, engine_times = STEPS[name], samples.engine_s[name]
        for kind, taken in (("model", times), ("engine", engine_times)):
            figures[f"{kind}_{name}"] = step.num_rows / median(taken), "tokens/s"
            figures[f"{kind}_{name}_best"] = step.num_rows / min(taken), "tokens/s"
        figures[f"model_{name}_step"] = median(times) * 1e3, "ms"
        figures[f"model_{name}_step_best"] = min(times) * 1e3, "ms"
        figures[f"model_{name}_of_roofline"] = median(samples.of_limits[name]), "ratio"
        figures[f"model_{name}_best_of_best_roofline"] = limits.step_s(step) / min(times), "ratio"
        shares = [model_s / engine_s for model_s, engine_s in zip(times, engine_times, strict=True)]
        figures[f"engine_{name}_of_model"] = median(shares), "ratio"
        figures[f"engine_{name}_best_of_model_best"] = min(times) / min(engine_times), "ratio"
    ratio = min(samples.model_s["decode_16"]) / min(samples.model_s["decode_8"])
    figures["model_decode_16_to_8"] = ratio, "ratio"
    least = limits.step_s(STEPS["decode_16"]) / limits.step_s(STEPS["decode_8"])
    figures["roofline_decode_16_to_8"] = least, "ratio"
    return figures


def peer_figures(samples: Samples) -> Figures:
    figures: Figures = {}
    for step, times in samples.peer_s.items():
        name, kind = step.split("/")
        figures[f"transformers_{kind}_{name}_step"] = median(times) * 1e3, "ms"
        figures[f"transformers_{kind}_{name}_step_best"] = min(times) * 1e3, "ms"
        ratio = median(times) / median(samples.engine_s[name])
        figures[f"engine_{name}_to_transformers_{kind}"] = ratio, "ratio"
    return figures


def overhead_figures(samples: Samples, no_math_s: float, told_s: float) -> Figures:
    """What of a step of one sequence is no arithmetic. `no_math_s`: the engine's step on ops that do
    nothing; `told_s`: from the token to text in a frame.
    """
    step_s = median(samples.engine_s["decode_1"])
    return {
        "overhead_1_engine": (no_math_s * 1e6, "us"),
        "overhead_1_text_and_frame": (told_s * 1e6, "us"),
        "overhead_1_share": ((no_math_s + told_s) / (step_s + told_s), "ratio"),
    }


class Contest:
    """All that is measured, loaded and warm."""

    def __init__(self, threads: int, clock: Clock, scratch: Path) -> None:
        settings = ClusterConfig()
        self._folder, self._clock = open_model(settings), clock
        self._config = config = ModelConfig.from_hf(self._folder.config)
        self._ops = make_ops(settings.cache_dir.expanduser() / "cpu-ops", config, threads)
        self._demo = DemoModel(
            self._folder, self._ops, max(step.num_blocks for step in STEPS.values()), clock
        )
        self._engines = {name: engine_of(self._demo, step) for name, step in STEPS.items()}
        self._peers: Mapping[str, Peer] = {kind: Peer(self._folder.path, kind, clock) for kind in KINDS}
        library = build_library(scratch)
        self._no_math = no_math_ops(library, threads)
        self._machine = Machine(library, self._ops, config, threads, clock)
        self._take(Samples(), QUICK_STEPS)  # the first of everything is slow

    def run(self, seconds: float) -> Figures:
        samples, number, end_s = Samples(), 0, time.monotonic() + seconds
        while number < MIN_ROUNDS or (number < MAX_ROUNDS and time.monotonic() < end_s):
            self._take(samples, QUICK_STEPS)
            if number % LONG_EVERY == 0:
                self._take(samples, LONG_STEPS)
                for kind, peer in self._peers.items():
                    samples.take_peer(kind, peer)
            number += 1
        figures = limit_figures(samples) | step_figures(samples, self._config) | peer_figures(samples)
        return figures | self._overhead(samples) | sampling_figures(5 * number, self._clock, self._ops.draw)

    def _take(self, samples: Samples, steps: tuple[Step, ...]) -> None:
        for step in steps:
            samples.take(step, self._machine, self._demo, self._engines[step.name])

    def _overhead(self, samples: Samples) -> Figures:
        step = STEPS["decode_1"]
        demo = DemoModel(self._folder, self._no_math, step.num_blocks, self._clock)
        engine = engine_of(demo, step)
        no_math_s = median(engine.step_s() for _ in range(200))
        return overhead_figures(
            samples, no_math_s, text_s(self._folder.path, self._clock) + frame_s(self._clock)
        )


def pair_figures() -> Figures:
    pair = Pair.start(str(demo_model_path()), ClusterConfig().cache_dir.expanduser())
    try:
        shares = pair.share(PAIR_ROUNDS)
    finally:
        pair.stop()
    return {
        "two_engines_of_lone_ones": (median(shares), "ratio"),
        "two_engines_of_lone_ones_best": (max(shares), "ratio"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--seconds", type=float, default=300, help="how long the rounds go on")
    parser.add_argument("--busy", action="store_true", help="one thread, by CPU time")
    parser.add_argument("--threads", type=int, default=2, help="threads of the engine")
    arguments = parser.parse_args()
    threads, clock = (1, time.process_time) if arguments.busy else (arguments.threads, time.perf_counter)
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as scratch:
        figures = Contest(threads, clock, Path(scratch)).run(arguments.seconds)
    if not arguments.busy:
        figures |= pair_figures()
    show(figures)
    if arguments.json is not None:
        write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
