"""Do two engines of one thread each, on two cores, keep the speed that each has alone?"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

BATCH = 8
ROUND_S = 2.0


@dataclass(frozen=True)
class Pair:
    """Two processes that decode for a while when they are asked to."""

    pipes: tuple[Connection, Connection]

    @classmethod
    def start(cls, model: str, cache_dir: Path) -> Pair:
        context = multiprocessing.get_context("spawn")
        pipes: list[Connection] = []
        for _ in range(2):
            ours, theirs = context.Pipe()
            context.Process(target=_serve, args=(theirs, model, cache_dir), daemon=True).start()
            pipes.append(ours)
        for pipe in pipes:
            pipe.recv()
        return cls((pipes[0], pipes[1]))

    def speeds(self, engines: Iterable[int]) -> list[float]:
        """Tokens/s of each of the engines, which run at the same time."""
        asked = [self.pipes[i] for i in engines]
        for pipe in asked:
            pipe.send(ROUND_S)
        return [pipe.recv() for pipe in asked]

    def share(self, num_rounds: int) -> list[float]:
        """Per round: the speed of both together, of the sum of what each does alone."""
        shares: list[float] = []
        for _ in range(num_rounds):
            (first,), (second,) = self.speeds([0]), self.speeds([1])
            shares.append(sum(self.speeds([0, 1])) / (first + second))
        return shares

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)


def _serve(pipe: Connection, model: str, cache_dir: Path) -> None:
    import torch
    from cpu_engine import Decoding, DemoModel, Step, make_ops

    from engine.model import ModelConfig
    from engine.weights import resolve_model

    torch.set_num_threads(1)
    folder = resolve_model(model, cache_dir=cache_dir / "models")
    ops = make_ops(cache_dir / "cpu-ops", ModelConfig.from_hf(folder.config), 1)
    step = Step("decode", BATCH)
    demo = DemoModel(folder, ops, step.num_blocks)
    pipe.send("ready")
    while (round_s := pipe.recv()) is not None:
        decoding = Decoding(demo, step)
        decoding.step_s()
        times: list[float] = []
        end_s = time.perf_counter() + round_s
        while time.perf_counter() < end_s:
            times.append(decoding.step_s())
        pipe.send(BATCH / median(times))
