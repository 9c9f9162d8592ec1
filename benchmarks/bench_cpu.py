"""How near are the CPU's limits? One line per figure: `name value unit`.

    make bench-cpu [ARGS="--quick --busy --threads 2 --json FILE"]

The demo model in bfloat16 at a context of 512 tokens. The machine's limits, the model's bare steps, the
same steps through the engine and transformers' take turns in one run; figures are medians, but limits
are the best that was reached: what else the machine did makes every share smaller, never greater.

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


@dataclass
class Samples:
    """Seconds of each kind of step, and the limits, in the order in which they were taken."""

    multiply: list[float] = field(default_factory=list)
    product: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    read_scattered: list[float] = field(default_factory=list)
    model_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    engine_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    peer_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def take_limits(self, machine: Machine) -> None:
        self.multiply.append(machine.multiply())
        self.product.append(machine.best_product())
        self.read.append(machine.read())
        self.read_scattered.append(machine.read(SCATTERED_BYTES))

    def take_steps(
        self, machine: Machine, demo: DemoModel, prefilling: Prefilling, decoding: dict[int, Decoding]
    ) -> None:
        self.model_s["prefill"].append(demo.prefill_s(CONTEXT))
        self.engine_s["prefill"].append(prefilling.step_s(CONTEXT))
        for batch, engine in decoding.items():
            self.take_limits(machine)
            for _ in range(2 + 16 // batch):
                self.model_s[f"decode_{batch}"].append(demo.decode_s(batch))
                self.engine_s[f"decode_{batch}"].append(engine.step_s())

    def take_peer(self, kind: str, peer: Peer) -> None:
        self.peer_s[f"prefill/{kind}"].append(peer.prefill_s(CONTEXT))
        for batch in PEER_BATCHES:
            self.peer_s[f"decode_{batch}/{kind}"] += peer.decode_s(batch)


def limit_figures(samples: Samples) -> Figures:
    return {
        "multiply_add_peak": (max(samples.multiply) / 1e9, "GFLOP/s"),
        "product_peak": (max(samples.product) / 1e9, "GFLOP/s"),
        "read_in_order_peak": (max(samples.read) / 1e9, "GB/s"),
        "read_scattered_peak": (max(samples.read_scattered) / 1e9, "GB/s"),
    }


def step_figures(samples: Samples, config: ModelConfig) -> Figures:
    """Each step's time, its share of the roofline, and what the engine adds."""
    roofline = Roofline(max(samples.product), max(samples.read), config, itemsize=2)
    figures: Figures = {}
    for name, times in samples.model_s.items():
        step_s, batch = median(times), 1 if name == "prefill" else int(name.removeprefix("decode_"))
        num_tokens = CONTEXT if name == "prefill" else batch
        least_s = roofline.step_s(num_tokens, batch, [(num_tokens // batch, CONTEXT)] * batch)
        engine_s = median(samples.engine_s[name])
        figures[f"model_{name}"] = num_tokens / step_s, "tokens/s"
        figures[f"model_{name}_step"] = step_s * 1e3, "ms"
        figures[f"model_{name}_step_least"] = min(times) * 1e3, "ms"
        figures[f"model_{name}_of_roofline"] = least_s / step_s, "ratio"
        figures[f"model_{name}_least_of_roofline"] = least_s / min(times), "ratio"
        figures[f"engine_{name}"] = num_tokens / engine_s, "tokens/s"
        figures[f"engine_{name}_of_model"] = step_s / engine_s, "ratio"
    figures["model_decode_16_to_8"] = _step_ratio(samples, 16, 8), "ratio"
    least_16, least_8 = (roofline.step_s(b, b, [(1, CONTEXT)] * b) for b in (16, 8))
    figures["roofline_decode_16_to_8"] = least_16 / least_8, "ratio"
    return figures


def _step_ratio(samples: Samples, batch: int, other: int) -> float:
    return median(samples.model_s[f"decode_{batch}"]) / median(samples.model_s[f"decode_{other}"])


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
