"""What does a step cost a group of ranks beside arithmetic? Broadcast of its plan, and the answers, in us.

    python benchmarks/rank_overhead.py [--ranks 2] [--steps 300]

Ranks are processes on this machine that compute nothing. Sequences have 512 tokens in blocks of 16.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch

from engine import Sequence, Slice, StepPlan
from engine.parallel import connect, host_store, join_store
from engine.parallel.channel import StepChannel
from engine.parallel.follower import Follower
from engine.parallel.message import Kind, bare_message, step_message
from protocol.generation import SamplingParams
from protocol.ids import BlockId, SequenceId

BLOCK_SIZE = 16
CONTEXT = 512
BATCHES = (1, 64)
LIMIT_S = 60.0
CPU = torch.device("cpu")


class Nothing:
    """A forward pass without arithmetic."""

    model = SimpleNamespace(device=CPU)

    def move(self, plan: StepPlan) -> None: ...

    def layout(self, batch: Any) -> Any: ...

    def run(self, batch: Any, layout: Any) -> Any: ...

    def logits(self, hidden: Any, rows: Any) -> Any: ...


def make_plan(batch: int) -> StepPlan:
    sequences = [
        Sequence(
            seq_id=SequenceId(f"s{index}"),
            sampling=SamplingParams(max_tokens=100),
            token_ids=[7] * CONTEXT,
            num_prompt_tokens=CONTEXT - 1,
            num_computed=CONTEXT - 1,
            block_table=[BlockId(block) for block in range(CONTEXT // BLOCK_SIZE)],
        )
        for index in range(batch)
    ]
    return StepPlan([Slice(sequence, 1) for sequence in sequences], batch, num_decodes=batch)


def channel_of(store: Any, rank: int, num_ranks: int) -> StepChannel:
    return StepChannel(connect("gloo", store, rank, num_ranks, device=CPU, limit_s=LIMIT_S))


def measure(channel: StepChannel, plan: StepPlan, num_steps: int) -> tuple[float, float]:
    """Medians in us: to write the message, and from its sending to the last answer."""
    writing, talking = [], []
    for serial in range(num_steps):
        started_s = time.perf_counter()
        message = step_message(serial, plan, BLOCK_SIZE)
        written_s = time.perf_counter()
        channel.send(message)
        channel.hear(serial)
        writing.append(written_s - started_s)
        talking.append(time.perf_counter() - written_s)
    return statistics.median(writing) * 1e6, statistics.median(talking) * 1e6


def lead(num_ranks: int, num_steps: int) -> None:
    store, address = host_store("127.0.0.1", limit_s=LIMIT_S)
    others = [
        subprocess.Popen(
            [sys.executable, __file__, "--follow", address, "--rank", str(rank), "--ranks", str(num_ranks)]
        )
        for rank in range(1, num_ranks)
    ]
    channel = channel_of(store, 0, num_ranks)
    found = []
    for batch in BATCHES:
        plan = make_plan(batch)
        measure(channel, plan, 20)
        writing_us, talking_us = measure(channel, plan, num_steps)
        found.append(
            f"batch {batch}: {writing_us:.0f} us to write, {talking_us:.0f} us broadcast + answers"
        )
    channel.send(bare_message(Kind.STOP, 0))
    channel.hear(0)
    for process in others:
        process.wait(LIMIT_S)
    print(f"{num_ranks} ranks, median of {num_steps} steps: {'; '.join(found)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--follow", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.follow:
        channel = channel_of(join_store(options.follow, limit_s=LIMIT_S), options.rank, options.ranks)
        Follower(Nothing(), channel).run()  # type: ignore[arg-type]
    else:
        lead(options.ranks, options.steps)


if __name__ == "__main__":
    main()
