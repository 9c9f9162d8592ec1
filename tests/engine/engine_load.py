"""Random load on a world: fast, repeatable by its seed, and without shrinking."""

from __future__ import annotations

import random
from dataclasses import replace

from engine_world import World

from protocol.generation import SamplingParams

HEADS = ([1, 2, 1, 2, 1, 2, 1, 2], [3, 1, 3, 1, 3, 1, 3, 1], [2, 2, 2, 2, 2, 2, 2, 2])
SALTS = ("", "", "tenant")


class RandomLoad:
    """Gives one command or step per turn."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._rng = random.Random(seed)
        self._turns = [
            (self._step, 60), (self._add, 9), (self._reserve, 7), (self._fetch, 8), (self._release, 7),
            (self._recompute, 1), (self._abort, 2), (self._abort_choice, 2), (self._invalidate, 3),
            (self._go_astray, 0.3),
        ]  # fmt: skip

    def run(self, num_steps: int) -> None:
        turns, weights = zip(*self._turns, strict=True)
        next_look = 0
        while self._world.num_steps < num_steps:
            self._rng.choices(turns, weights)[0]()
            if self._world.num_steps >= next_look:
                self._world.forget_ended()
                next_look += 50
        self._world.finish()

    def _step(self) -> None:
        self._world.step()

    def _add(self) -> None:
        rng = self._rng
        sampling = self._sampling()
        if rng.random() < 0.1:
            sampling = replace(sampling, prompt_logprobs=1)
        self._world.add(
            self._prompt(), sampling, n=rng.choice([1, 1, 1, 2, 3]), hold=rng.random() < 0.3,
            num_given=rng.choice([0, 0, 1, 2]), salt=rng.choice(SALTS), priority=rng.choice([0, 0, 1, 5]),
        )  # fmt: skip

    def _reserve(self) -> None:
        rng = self._rng
        self._world.reserve(
            self._prompt(), self._sampling(), n=rng.choice([1, 1, 2, 3]),
            num_given=rng.choice([0, 0, 1, 2]), salt=rng.choice(SALTS), priority=rng.choice([0, 0, 1, 5]),
        )  # fmt: skip

    def _fetch(self) -> None:
        self._world.fetch(self._pick(), good=self._rng.random() < 0.8)

    def _recompute(self) -> None:
        self._world.recompute(self._pick())

    def _go_astray(self) -> None:
        self._world.go_astray(self._pick(), admits=self._rng.random() < 0.5, ends=self._rng.random() < 0.5)

    def _release(self) -> None:
        self._world.release(self._pick())

    def _abort(self) -> None:
        self._world.abort(self._pick())

    def _abort_choice(self) -> None:
        self._world.abort_choice(self._pick(), self._rng.randrange(3))

    def _invalidate(self) -> None:
        rng = self._rng
        head = rng.choice([None, *(head[:length] for head in HEADS for length in (2, 4, 8))])
        self._world.invalidate(head, rng.choice([None, *SALTS]))

    def _pick(self) -> int:
        return self._rng.randrange(1000)

    def _prompt(self) -> list[int]:
        return self._rng.choice(HEADS) + self._rng.choices([1, 2, 3], k=self._rng.randrange(8))

    def _sampling(self) -> SamplingParams:
        rng = self._rng
        return SamplingParams(
            max_tokens=rng.randint(2, 14), ignore_eos=rng.random() < 0.5, min_tokens=rng.choice([0, 0, 3]),
            stop_token_ids=rng.choice([(), (5,)]), seed=rng.randrange(1 << 32),
        )  # fmt: skip
