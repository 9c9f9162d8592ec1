"""What a step costs does not grow with the length of those that wait, nor of what they outrank."""

from __future__ import annotations

from functools import partial

import pytest
from engine_harness import Engine, greedy
from opcodes import num_opcodes

from engine.bad_words import BadWords
from engine.fake_executor import FakeExecutor
from engine.plan import StepPlan, StepResult
from protocol.generation import Token

LONG, SHORT = 800, 40


def step_work(engine: Engine) -> int:
    """The least of some steps: in others a decode gets a block."""
    return min(num_opcodes(engine.core.step) for _ in range(6))


class IdleDevice(FakeExecutor):
    """Its work is not the scheduler's."""

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult([Token(1) if piece.samples else None for piece in plan.slices])


def crowd(num_blocks: int, **settings: object) -> Engine:
    return Engine(
        make_executor=IdleDevice,
        num_blocks=num_blocks,
        max_model_len=8 * num_blocks,
        max_num_batched_tokens=4 * num_blocks,
        **settings,
    )


def work_with_a_cached_head(num_blocks: int, *, is_idle: bool) -> int:
    """The first one waiting has a cached prefix of so many blocks, and does not fit all the same."""
    engine = crowd(2 * num_blocks + 30)
    prefix = list(range(100, 100 + 4 * num_blocks))
    engine.add("cached", [*prefix, 1], greedy(1))
    engine.run()
    if not is_idle:
        engine.add("user", [*prefix, 2], greedy(100))
    engine.add("other", [3] * 4 * (num_blocks + 15 if is_idle else 15), greedy(100))
    engine.step()
    tail = 16 if is_idle else num_blocks + 20
    engine.add("head", prefix + [5] * 4 * tail, greedy(1))
    engine.step()
    assert engine.roster.waiting.first is not None
    assert len(engine.roster.cache.prefix_of(engine.roster.waiting.first).block_ids) == num_blocks
    return step_work(engine)


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_cached_prefix_of_the_first_one_waiting_is_not_walked_again(is_idle: bool) -> None:
    work = [work_with_a_cached_head(num_blocks, is_idle=is_idle) for num_blocks in (SHORT, LONG)]
    assert work[1] < work[0] * 1.2


def work_with_a_hopeless_head(num_blocks: int) -> int:
    """It outranks two that share all their blocks: those are too few, though twice as many are not."""
    engine = crowd(2 * num_blocks + 20, policy="priority")
    prefix = list(range(100, 100 + 4 * num_blocks))
    engine.add("a", [*prefix, 1], greedy(100), priority=1)
    engine.step()
    engine.add("b", [*prefix, 2], greedy(100), priority=1)
    engine.add("above", [3] * 4 * 20, greedy(100), priority=-1)
    engine.step()
    engine.add("head", [4] * 4 * (2 * num_blocks + 5), greedy(1))
    for _ in range(5):
        engine.step()
    assert engine.roster.num_running == 3
    return step_work(engine)


def test_those_that_are_too_few_to_give_way_are_counted_once() -> None:
    work = [work_with_a_hopeless_head(num_blocks) for num_blocks in (SHORT, LONG)]
    assert work[1] < work[0] * 1.2


def test_bad_words_that_the_output_does_not_come_near_cost_nothing() -> None:
    few, many = ([tuple(range(i, i + 50)) for i in range(n)] for n in (2, 200))
    output = [1000 + i for i in range(100)]
    work = [num_opcodes(partial(list, BadWords(words).ends_after(output, 3))) for words in (few, many)]
    assert work[0] == work[1] > 0
