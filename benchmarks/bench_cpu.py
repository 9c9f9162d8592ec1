"""How near are the CPU's limits? One line per figure: `name value unit`.

    make bench-cpu [ARGS="--quick --busy --threads 2 --json FILE"]

The demo model in bfloat16 at a context of 512 tokens. The machine's limits, the model's bare steps, the
same steps through the engine and transformers' take turns in one run; figures are medians. A step's share of
the roofline is that of the limits measured just before and after it (the better of both): a machine that it
shares with others changes its speed from second to second.

On a machine with other work, `--busy` takes CPU time in place of the wall's, and one thread: it says what
that thread would take alone, but for caches and memory that it shares. Two engines are left out then.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from cpu_engine import CONTEXT, Decoding, DemoModel, Prefilling, make_ops
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

BATCHES = (1, 8, 16, 32, 64)
PEER_BATCHES = (1, 32)
SCATTERED_BYTES = 12288
"""What lies together in a block: the keys and values of one layer."""


STEPS = [("prefill", 1, 2), *((f"decode_{batch}", batch, 2 + 16 // batch) for batch in BATCHES)]
"""Name, sequences, and how often it is measured per round."""


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


def work_of(name: str, batch: int) -> tuple[int, int, list[tuple[int, int]]]:
    """Rows, rows of logits, and contexts of a step, as `Roofline.step_s` takes them."""
    num_tokens = CONTEXT if name == "prefill" else 1
    return num_tokens * batch, batch, [(num_tokens, CONTEXT)] * batch


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

    def take_steps(
        self, machine: Machine, demo: DemoModel, prefilling: Prefilling, decoding: dict[int, Decoding]
    ) -> None:
        self.take_limits(machine)
        for name, batch, count in STEPS:
            first = len(self.model_s[name])
            for _ in range(count):
                is_prefill = name == "prefill"
                self.model_s[name].append(demo.prefill_s(CONTEXT) if is_prefill else demo.decode_s(batch))
                self.engine_s[name].append(
                    prefilling.step_s(CONTEXT) if is_prefill else decoding[batch].step_s()
                )
            self.take_limits(machine)
            least_s = roofline(self.limits[-2:], demo.config).step_s(*work_of(name, batch))
            self.of_limits[name] += [least_s / taken_s for taken_s in self.model_s[name][first:]]

    def take_peer(self, kind: str, peer: Peer) -> None:
        self.peer_s[f"prefill/{kind}"].append(peer.prefill_s(CONTEXT))
        for batch in PEER_BATCHES:
            self.peer_s[f"decode_{batch}/{kind}"] += peer.decode_s(batch)


def limit_figures(samples: Samples) -> Figures:
    units = ("GFLOP/s", "GFLOP/s", "GB/s", "GB/s")
    figures: Figures = {}
    for name, values, unit in zip(Limits._fields, zip(*samples.limits, strict=True), units, strict=True):
        figures[f"{name}_peak"] = max(values) / 1e9, unit
        figures[f"{name}_median"] = median(values) / 1e9, unit
    return figures


def step_figures(samples: Samples, config: ModelConfig) -> Figures:
    """Each step's time, its share of the roofline, and what the engine adds."""
    figures: Figures = {}
    for name, batch, _ in STEPS:
        times, engine_times = samples.model_s[name], samples.engine_s[name]
        num_tokens = work_of(name, batch)[0]
        figures[f"model_{name}"] = num_tokens / median(times), "tokens/s"
        figures[f"model_{name}_step"] = median(times) * 1e3, "ms"
        figures[f"model_{name}_step_least"] = min(times) * 1e3, "ms"
        figures[f"model_{name}_of_roofline"] = median(samples.of_limits[name]), "ratio"
        figures[f"engine_{name}"] = num_tokens / median(engine_times), "tokens/s"
        shares = [model_s / engine_s for model_s, engine_s in zip(times, engine_times, strict=True)]
        figures[f"engine_{name}_of_model"] = median(shares), "ratio"
    model = {batch: median(samples.model_s[f"decode_{batch}"]) for batch in (8, 16)}
    figures["model_decode_16_to_8"] = model[16] / model[8], "ratio"
    limits = roofline(samples.limits, config)
    least = {batch: limits.step_s(*work_of("decode", batch)) for batch in (8, 16)}
    figures["roofline_decode_16_to_8"] = least[16] / least[8], "ratio"
    return figures


def peer_figures(samples: Samples) -> Figures:
    figures: Figures = {}
    for step, times in samples.peer_s.items():
        name, kind = step.split("/")
        ours_s = median(samples.engine_s[name])
        figures[f"transformers_{kind}_{name}_step"] = median(times) * 1e3, "ms"
        figures[f"engine_{name}_to_transformers_{kind}"] = median(times) / ours_s, "ratio"
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


def measure(threads: int, num_rounds: int, clock: Clock) -> Figures:
    torch.set_num_threads(threads)
    settings = ClusterConfig()
    cache_dir = settings.cache_dir.expanduser()
    folder = open_model(settings)
    config = ModelConfig.from_hf(folder.config)
    ops = make_ops(cache_dir / "cpu-ops", config, threads)
    demo = DemoModel(folder, ops, clock=clock)
    samples = Samples()
    with tempfile.TemporaryDirectory() as scratch:
        library = build_library(Path(scratch))
        machine = Machine(library, ops, config, threads, clock)
        prefilling = Prefilling(demo)
        decoding = {batch: Decoding(demo, batch) for batch in BATCHES}
        peers = {kind: Peer(folder.path, kind, clock) for kind in KINDS}
        Samples().take_steps(machine, demo, prefilling, decoding)  # the first of everything is slow
        for number in range(num_rounds):
            samples.take_steps(machine, demo, prefilling, decoding)
            for kind, peer in peers.items() if number % 3 == 0 else ():
                samples.take_peer(kind, peer)
        empty = Decoding(DemoModel(folder, no_math_ops(library, threads), 1, clock), 1)
        no_math_s = median(empty.step_s() for _ in range(200))
    figures = limit_figures(samples) | step_figures(samples, config) | peer_figures(samples)
    told_s = text_s(folder.path, clock) + frame_s(clock)
    figures |= overhead_figures(samples, no_math_s, told_s)
    return figures | sampling_figures(num_rounds * 5, clock, ops.draw)


def pair_figures(num_rounds: int) -> Figures:
    pair = Pair.start(str(demo_model_path()), ClusterConfig().cache_dir.expanduser())
    try:
        return {"two_engines_of_lone_ones": (median(pair.share(num_rounds)), "ratio")}
    finally:
        pair.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--busy", action="store_true", help="one thread, by CPU time")
    parser.add_argument("--threads", type=int, default=2, help="threads of the engine")
    arguments = parser.parse_args()
    num_rounds = 3 if arguments.quick else 9
    if arguments.busy:
        figures = measure(1, num_rounds, time.process_time)
    else:
        figures = measure(arguments.threads, num_rounds, time.perf_counter) | pair_figures(num_rounds)
    show(figures)
    if arguments.json is not None:
        write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
