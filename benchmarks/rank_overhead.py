"""What does a step cost a group of ranks beside arithmetic? Message, answers, a pulse, a sum; in us.

    python benchmarks/rank_overhead.py [--ranks 2] [--steps 300]

Ranks are processes on this machine that compute nothing. Sequences have 512 tokens in blocks of 16. A sum
is one of those that a model has two of per layer, 576 wide (SmolLM2-135M) in float32. A socket pair, which
carries a message of the same size and brings 8 bytes back, says what the machine could do.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from engine import Sequence, Slice, StepPlan
from engine.parallel import Communicator, connect_groups, host_store, join_store
from engine.parallel.channel import StepChannel
from engine.parallel.follower import Follower
from engine.parallel.message import IntArray, Kind, bare_message, step_message
from protocol.generation import SamplingParams
from protocol.ids import BlockId, SequenceId
from protocol.rank_layout import RankLayout

BLOCK_SIZE = 16
CONTEXT = 512
BATCHES = (1, 64)
WIDTH = 576
WARM_UP = 20
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


def time_it(label: str, num_times: int, work: Callable[[int], object]) -> None:
    """Print one line: median and minimum of calls with 0, 1, 2..."""
    for number in range(WARM_UP):
        work(number)
    taken_us = []
    for number in range(num_times):
        started_s = time.perf_counter()
        work(number)
        taken_us.append((time.perf_counter() - started_s) * 1e6)
    print(f"{label:44} median {statistics.median(taken_us):6.0f} us   minimum {min(taken_us):6.0f} us")


def lead(num_ranks: int, num_steps: int) -> None:
    store, address = host_store("127.0.0.1", limit_s=LIMIT_S)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    arguments = [
        *("--follow", address, "--ranks", str(num_ranks), "--steps", str(num_steps), "--port", str(port))
    ]
    others = [
        subprocess.Popen([sys.executable, __file__, *arguments, "--rank", str(rank)])
        for rank in range(1, num_ranks)
    ]
    groups = connect_groups("tcp", store, 0, RankLayout(num_ranks), device=CPU, limit_s=LIMIT_S)
    measure_steps(StepChannel(groups.steps), num_steps)
    measure_sums(groups.stage, num_steps, time_it)
    measure_socket(listener, num_steps)
    for process in others:
        process.wait(LIMIT_S)


def measure_steps(channel: StepChannel, num_steps: int) -> None:
    def tell(message: IntArray, serial: int) -> None:
        channel.send(message)
        channel.hear(serial)

    for batch in BATCHES:
        plan = make_plan(batch)
        time_it(f"step, {of(batch)}: write the message", num_steps, as_message := message_of(plan))
        message = as_message(0)
        time_it(f"step, {of(batch)}: send it, hear the answers", num_steps, lambda _, m=message: tell(m, 0))
    pulse = bare_message(Kind.PULSE, 0)
    time_it("pulse, once a second while idle", num_steps, lambda _: tell(pulse, 0))
    tell(bare_message(Kind.STOP, 0), 0)


def message_of(plan: StepPlan) -> Callable[[int], IntArray]:
    return lambda serial: step_message(serial, plan, BLOCK_SIZE)


def measure_sums(
    stage: Communicator, num_steps: int, timed: Callable[[str, int, Callable[[int], object]], None]
) -> None:
    for batch in BATCHES:
        x = torch.ones(batch, WIDTH)
        timed(f"sum, {of(batch)}", num_steps, lambda _, x=x: stage.all_reduce(x))


def measure_socket(listener: socket.socket, num_steps: int) -> None:
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    message = step_message(0, make_plan(max(BATCHES)), BLOCK_SIZE).tobytes()
    connection.sendall(len(message).to_bytes(8, "little"))

    def tell(_: int) -> None:
        connection.sendall(message)
        receive(connection, 8)

    with connection:
        time_it(f"socket pair, message of {of(max(BATCHES))}", num_steps, tell)


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        data += connection.recv(num_bytes - len(data))
    return bytes(data)


def of(batch: int) -> str:
    return "1 sequence" if batch == 1 else f"{batch} sequences"


def follow(address: str, rank: int, num_ranks: int, num_steps: int, port: int) -> None:
    """What the leader needs of another rank, in the leader's order."""
    store = join_store(address, limit_s=LIMIT_S)
    groups = connect_groups("tcp", store, rank, RankLayout(num_ranks), device=CPU, limit_s=LIMIT_S)
    Follower(Nothing(), StepChannel(groups.steps)).run()  # type: ignore[arg-type]

    def take_part(_: str, num_times: int, work: Callable[[int], object]) -> None:
        for number in range(WARM_UP + num_times):
            work(number)

    measure_sums(groups.stage, num_steps, take_part)
    if rank == 1:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            num_bytes = int.from_bytes(receive(connection, 8), "little")
            for _ in range(WARM_UP + num_steps):
                receive(connection, num_bytes)
                connection.sendall(bytes(8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--follow", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.follow:
        follow(options.follow, options.rank, options.ranks, options.steps, options.port)
    else:
        lead(options.ranks, options.steps)


if __name__ == "__main__":
    main()
