"""What does the scheduler cost per step, beside a device that takes no time?

    python benchmarks/scheduler_cost.py [--json FILE] [--steps N]

Runs `num_seqs` decodes in a pool where nobody waits, and takes the CPU time of `schedule` and `apply`
alone. Between the steps it times a fixed loop of plain Python, so that figures of different machines and
hours compare: the aim of 50 us + 1 us per sequence is meant for a machine where that loop takes `LOOP_US`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

from engine import AddSequence, EngineCore, SchedulerConfig, StepPlan, StepResult
from protocol.generation import SamplingParams, Token
from protocol.ids import SequenceId

LOOP_US = 250.0
"""What the fixed loop takes where the aim is meant to hold as it stands."""
BASE_US, PER_SEQUENCE_US = 50.0, 1.0
SIZES = (1, 32, 256)
PROMPT_TOKENS = 64


class InstantDevice:
    """Samples the same token for everyone, in no time worth mentioning."""

    _token = Token(7)

    def execute(self, plan: StepPlan) -> StepResult:
        tokens = [self._token if piece.samples else None for piece in plan.slices[plan.num_decodes :]]
        return StepResult([self._token] * plan.num_decodes + tokens)


def fixed_loop_us() -> float:
    """Microseconds that a fixed piece of plain Python takes: dict and list work, as a scheduler's."""
    started_s = time.thread_time()
    items = {i: [i] for i in range(1000)}
    for _ in range(10):
        for key, value in items.items():
            if value[0] != key:
                raise AssertionError
    return (time.thread_time() - started_s) * 1e6


def step_costs_us(num_seqs: int, num_steps: int) -> tuple[list[float], list[float]]:
    """`schedule` + `apply` of each step with `num_seqs` running decodes, and the fixed loop beside each."""
    config = SchedulerConfig(
        num_blocks=1 + num_seqs * (PROMPT_TOKENS + num_steps + 32) // 16,
        max_model_len=PROMPT_TOKENS + num_steps + 32,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(2048, num_seqs),
        max_num_waiting=num_seqs,
        low_watermark=0.0,
        high_watermark=0.0,
    )
    core = EngineCore(config, InstantDevice(), frozenset(), time.thread_time)
    for i in range(num_seqs):
        prompt = tuple(range(i * PROMPT_TOKENS, (i + 1) * PROMPT_TOKENS - i % 16))
        core.handle(
            AddSequence(SequenceId(f"s{i}"), prompt, SamplingParams(num_steps + 16, ignore_eos=True))
        )
    while core.stats().last_num_tokens != num_seqs or core.stats().num_waiting:
        core.step()
    costs: list[float] = []
    loops: list[float] = []
    for _ in range(num_steps):
        core.step()
        stats = core.stats()
        costs.append((stats.last_schedule_s + stats.last_apply_s) * 1e6)
        loops.append(fixed_loop_us())
    return costs, loops


def measure(num_steps: int) -> dict[str, tuple[float, str]]:
    figures: dict[str, tuple[float, str]] = {}
    for num_seqs in SIZES:
        costs, loops = step_costs_us(num_seqs, num_steps)
        cost_us, loop_us = median(costs), median(loops)
        bound_us = (BASE_US + PER_SEQUENCE_US * num_seqs) * loop_us / LOOP_US
        figures[f"fixed_loop_{num_seqs}_median"] = loop_us, "us"
        figures[f"scheduler_step_{num_seqs}_median"] = cost_us, "us"
        figures[f"scheduler_step_{num_seqs}_mean"] = sum(costs) / len(costs), "us"
        figures[f"scheduler_step_{num_seqs}_least"] = min(costs), "us"
        figures[f"scheduler_step_{num_seqs}_per_fixed_loop"] = cost_us / loop_us, "ratio"
        figures[f"scheduler_step_{num_seqs}_of_bound"] = cost_us / bound_us, "ratio"
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    figures = measure(arguments.steps)
    for name, (value, unit) in figures.items():
        print(f"{name} {value:.4g} {unit}")
    if arguments.json is not None:
        record = {name: {"value": value, "unit": unit} for name, (value, unit) in figures.items()}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
