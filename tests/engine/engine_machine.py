"""The state machine over an engine: commands of all kinds in any order, which Hypothesis chooses."""

from __future__ import annotations

import sys

from engine_load import HEADS, SALTS
from engine_world import World
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protocol.generation import SamplingParams

# Few different heads, so that prefixes are shared, and tails of all lengths around block boundaries.
PROMPTS = st.builds(
    lambda head, tail: head + tail, st.sampled_from(HEADS), st.lists(st.integers(1, 3), max_size=7)
)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(2, 14),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 3]),
    stop_token_ids=st.sampled_from([(), (5,)]),
    seed=st.integers(0, 2**64 - 1),
    prompt_logprobs=st.sampled_from([None, None, None, 1]),
)
PICK = st.integers(0, 1000)
SALT = st.sampled_from(SALTS)
TAILS = st.lists(st.lists(st.integers(1, 3), max_size=7), min_size=2, max_size=4)
PRIORITY = st.sampled_from([0, 0, 1, 5])
SETTINGS = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["fcfs", "priority", "shortest_first"]),
        "preemption": st.sampled_from(["recompute", "swap"]),
        "num_host_blocks": st.sampled_from([0, 4, 20]),
        "low_watermark": st.sampled_from([0.0, 0.1]),
        "high_watermark": st.sampled_from([0.1, 0.3]),
        "long_prefill_token_threshold": st.sampled_from([0, 4]),
        "max_num_waiting": st.sampled_from([3, 20]),
        "ageing_tokens": st.sampled_from([1, 8]),
    }
)


class AnyOrder(RuleBasedStateMachine):
    """Commands in any order against a small pool; `check_integrity` runs after each."""

    def make_world(self, **engine_settings: object) -> World:
        return World(**engine_settings)

    @initialize(engine_settings=SETTINGS)
    def start(self, engine_settings: dict[str, object]) -> None:
        self.world = self.make_world(**engine_settings)

    @rule(
        prompt=PROMPTS,
        sampling=SAMPLING,
        n=st.sampled_from([1, 1, 2, 3]),
        hold=st.booleans(),
        num_given=st.integers(0, 3),
        salt=SALT,
        priority=PRIORITY,
    )
    def add(self, prompt: list[int], sampling: SamplingParams, **more: object) -> None:
        self.world.add(prompt, sampling, **more)  # type: ignore[arg-type]

    @rule(
        prompt=PROMPTS,
        sampling=SAMPLING,
        n=st.sampled_from([1, 2, 3]),
        num_given=st.integers(0, 3),
        salt=SALT,
        priority=st.sampled_from([-1, 0, 1]),
    )
    def reserve(self, prompt: list[int], sampling: SamplingParams, **more: object) -> None:
        self.world.reserve(prompt, sampling, **more)  # type: ignore[arg-type]

    @rule(head=st.sampled_from(HEADS), tails=TAILS, sampling=SAMPLING, priority=st.sampled_from([0, 5, 5]))
    def crowd(
        self, head: list[int], tails: list[list[int]], sampling: SamplingParams, priority: int
    ) -> None:
        """Several that share a prefix, so that seats and blocks are scarce more often."""
        for tail in tails:
            self.world.add(head + tail, sampling, priority=priority)
            self.world.step()

    @rule(pick=PICK, good=st.booleans())
    def fetch(self, pick: int, good: bool) -> None:
        self.world.fetch(pick, good=good)

    @rule(pick=PICK)
    def fetch_without_verdict(self, pick: int) -> None:
        self.world.fetch_without_verdict(pick)

    @rule(pick=PICK)
    def recompute(self, pick: int) -> None:
        self.world.recompute(pick)

    @rule(pick=PICK, admits=st.booleans(), ends=st.booleans())
    def go_astray(self, pick: int, admits: bool, ends: bool) -> None:
        self.world.go_astray(pick, admits=admits, ends=ends)

    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        self.world.release(pick)

    @rule(pick=PICK)
    def abort(self, pick: int) -> None:
        self.world.abort(pick)

    @rule(pick=PICK, index=st.integers(0, 2))
    def abort_choice(self, pick: int, index: int) -> None:
        self.world.abort_choice(pick, index)

    @rule(head=st.one_of(st.none(), st.sampled_from(HEADS)), length=st.integers(0, 8), salt=SALT)
    def invalidate(self, head: list[int] | None, length: int, salt: str) -> None:
        self.world.invalidate(None if head is None else head[:length], salt)

    @rule()
    def invalidate_everything(self) -> None:
        self.world.invalidate(None, None)

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.world.step()

    @invariant()
    def tokens_are_those_of_an_undisturbed_run(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        """Everything that is left comes to its end, in a bounded number of steps, and nothing leaks."""
        is_broken = sys.exc_info()[0] is not None  # then what follows would only hide what was found
        if hasattr(self, "world") and not is_broken:
            self.world.finish()


def machine_settings(num_runs: int, *, shrink: bool) -> settings:
    """The same examples every time."""
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    return settings(
        max_examples=num_runs,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        database=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
