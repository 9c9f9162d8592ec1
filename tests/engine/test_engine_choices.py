"""Several choices of one request: one prompt, shared blocks, tokens of their own."""

from __future__ import annotations

import pytest
from engine_harness import Engine, greedy

from engine.messages import AddSequence, Sibling
from protocol.errors import InvalidRequest
from protocol.generation import FinishReason, SamplingParams, choice_seed
from protocol.ids import SequenceId

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
SEED = 5


def seeded(max_tokens: int = 8, **more: object) -> SamplingParams:
    return greedy(max_tokens, seed=SEED, **more)


def choice(engine: Engine, index: int, num_tokens: int) -> list[int]:
    """What the request of one choice with the choice's own seed gives."""
    return engine.expected(PROMPT, num_tokens, seed=choice_seed(SEED, index))


def test_each_choice_is_the_request_of_one_choice_with_its_own_seed() -> None:
    engine = Engine()
    engine.add("a", PROMPT, seeded(8), n=3)
    engine.run()
    for index, name in enumerate(["a", "a#1", "a#2"]):
        assert engine.tokens[name] == choice(engine, index, 8)
        assert engine.finished[name] is FinishReason.LENGTH
    assert len({tuple(tokens) for tokens in engine.tokens.values()}) == 3
    engine.core.assert_idle()


def test_the_prompt_is_computed_once_and_its_blocks_are_shared() -> None:
    engine = Engine()
    engine.add("a", PROMPT, seeded(), n=4)
    engine.step()
    assert engine.last_plan == [("a", 10)]
    assert engine.core.stats().num_running == 4
    assert engine.core.stats().blocks_free == 64 - 3
    engine.step()
    assert engine.last_plan == [("a", 1)] * 4
    # Three copies of the third block, which is partly filled; its last owner writes it in place.
    assert engine.core.stats().copied_blocks == 3
    assert engine.core.stats().blocks_free == 64 - 2 - 4
    engine.run()
    engine.core.assert_idle()


def test_nothing_is_copied_when_the_prompt_fills_its_blocks() -> None:
    engine = Engine()
    engine.add("a", PROMPT[:8], seeded(), n=3)
    engine.run()
    assert engine.core.stats().copied_blocks == 0
    assert engine.core.stats().prompt_tokens_computed == 8


def test_choices_take_a_seat_each_from_their_admission_on() -> None:
    engine = Engine(max_num_seqs=4, max_num_batched_tokens=8)
    engine.add("a", PROMPT, seeded(6), n=3)
    engine.add("b", PROMPT, seeded(6), n=2)
    engine.step()
    engine.step()
    assert engine.core.stats().num_running == 3
    assert engine.core.stats().num_waiting == 1
    engine.run()
    assert engine.tokens["b#1"] == choice(engine, 1, 6)
    engine.core.assert_idle()


def test_more_choices_than_seats_are_refused() -> None:
    engine = Engine(max_num_seqs=2)
    engine.add("a", PROMPT, seeded(), n=3)
    assert isinstance(engine.failed["a"], InvalidRequest)
    engine.core.assert_idle()


def test_a_choice_that_goes_on_alone_keeps_its_index() -> None:
    engine = Engine()
    whole = choice(engine, 2, 8)
    sampling = greedy(8, seed=choice_seed(SEED, 2))
    engine.handle(AddSequence(SequenceId("a"), tuple(PROMPT), sampling, tuple(whole[:3]), index=2))
    engine.run()
    assert engine.tokens["a#2"] == whole[3:]


def test_choices_end_each_for_itself() -> None:
    engine = Engine()
    stop = choice(engine, 1, 1)[0]
    assert stop not in [*choice(engine, 0, 5), *choice(engine, 2, 5)]
    engine.add("a", PROMPT, seeded(5, stop_token_ids=(stop,)), n=3)
    engine.run()
    assert engine.finished == {
        "a": FinishReason.LENGTH, "a#1": FinishReason.STOP, "a#2": FinishReason.LENGTH,
    }  # fmt: skip
    assert len(engine.tokens["a#1"]) == 1
    engine.core.assert_idle()


# ---- Aborts of one choice ----


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_the_others_go_on_when_one_choice_is_aborted(index: int, num_steps: int) -> None:
    """Waiting, half-way through the prompt, just born, and decoding."""
    engine = Engine(max_num_batched_tokens=8)
    engine.add("a", PROMPT, seeded(6), n=3)
    for _ in range(num_steps):
        engine.step()
    assert engine.abort("a", index) == []
    engine.run()
    for other in {0, 1, 2} - {index}:
        assert engine.tokens[f"a#{other}" if other else "a"] == choice(engine, other, 6)
    assert (f"a#{index}" if index else "a") not in engine.finished
    engine.core.assert_idle()


def test_the_request_is_gone_with_its_last_choice() -> None:
    engine = Engine()
    engine.add("a", PROMPT, seeded(6), n=2)
    engine.abort("a", 0)
    engine.abort("a", 0)
    assert engine.core.live_sequence_ids == ("a",)
    engine.abort("a", 1)
    engine.core.assert_idle()


def test_an_abort_of_all_ends_every_choice() -> None:
    engine = Engine()
    engine.add("a", PROMPT, seeded(6), n=3)
    engine.step()
    engine.abort("a")
    engine.core.assert_idle()


# ---- Preemption ----


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_choices_are_preempted_each_for_itself_and_give_the_same_tokens(preemption: str) -> None:
    engine = Engine(num_blocks=11, preemption=preemption, num_host_blocks=20)
    engine.add("a", PROMPT, seeded(20), n=4)
    engine.run()
    assert engine.core.stats().num_preemptions > 0
    for index, name in enumerate(["a", "a#1", "a#2", "a#3"]):
        assert engine.tokens[name] == choice(engine, index, 20)
    engine.core.assert_idle()


def test_a_group_that_is_preempted_before_its_birth_waits_as_one() -> None:
    engine = Engine(num_blocks=11, max_num_batched_tokens=8, enable_prefix_caching=False, policy="priority")
    engine.add("a", [*PROMPT, *PROMPT], seeded(4), n=3, priority=1)
    engine.step()
    engine.add("first", [9] * 24, greedy(2))
    engine.step()
    assert engine.core.stats().num_waiting == 1
    engine.run()
    assert {"first", "a", "a#1", "a#2"} == set(engine.finished)
    assert engine.tokens["a#2"] == engine.expected([*PROMPT, *PROMPT], 4, seed=choice_seed(SEED, 2))
    engine.core.assert_idle()


# ---- Hand-off ----


def test_held_choices_are_one_held_sequence_with_a_first_token_each() -> None:
    engine = Engine()
    engine.add("a", PROMPT, seeded(), n=3, hold=True)
    engine.run()
    assert engine.core.stats().num_held == 1
    assert engine.core.stats().blocks_free == 64 - 3
    for index, name in enumerate(["a", "a#1", "a#2"]):
        assert engine.tokens[name] == choice(engine, index, 1)
    assert not engine.finished
    engine.executor.verify(engine.allocated["a"].block_ids, PROMPT, len(PROMPT))
    engine.release("a")
    engine.core.assert_idle()


@pytest.mark.parametrize("ended", [0, 1])
def test_held_blocks_stay_while_any_choice_goes_on(ended: int) -> None:
    engine = Engine()
    stop = choice(engine, ended, 1)[0]
    engine.add("a", PROMPT, seeded(stop_token_ids=(stop,)), n=2, hold=True)
    engine.run()
    assert list(engine.finished) == ["a#1" if ended else "a"]
    assert engine.core.stats().num_held == 1
    engine.abort("a", 1 - ended)
    engine.core.assert_idle()


def test_a_held_group_is_gone_when_all_choices_end_at_once() -> None:
    engine = Engine()
    engine.add("a", PROMPT, seeded(1), n=3, hold=True)
    engine.run()
    assert len(engine.finished) == 3
    engine.core.assert_idle()


def reserve_three(engine: Engine, prompt: list[int]) -> None:
    """As after a prefill elsewhere at which choice 0 ended."""
    firsts = [engine.expected(prompt, 1, seed=choice_seed(SEED, i))[0] for i in range(3)]
    sampling = greedy(7, seed=choice_seed(SEED, 1))
    sibling = Sibling(2, (firsts[2],), choice_seed(SEED, 2))
    engine.reserve("a", prompt, (firsts[1],), sampling, index=1, siblings=(sibling,))


@pytest.mark.parametrize("length", [7, 8, 9])
def test_one_reservation_and_one_fetch_serve_all_choices(length: int) -> None:
    engine = Engine()
    prompt = PROMPT[:length]
    reserve_three(engine, prompt)
    assert len(engine.allocated["a"].block_ids) == -(-length // 4)
    engine.fill("a", prompt)
    engine.admit("a")
    assert engine.core.stats().prompt_tokens_transferred == length
    engine.run()
    for index in (1, 2):
        expected = engine.expected(prompt, 7, seed=choice_seed(SEED, index))
        assert engine.tokens[f"a#{index}"] == expected[1:]
    assert engine.core.stats().prompt_tokens_computed == 0
    engine.core.assert_idle()


@pytest.mark.parametrize("length", [7, 8, 9])
def test_a_failed_fetch_is_recomputed_once_for_all_choices(length: int) -> None:
    """Length 7: the first choice fills the block in which the second one parts from it."""
    engine = Engine()
    prompt = PROMPT[:length]
    reserve_three(engine, prompt)
    engine.fill("a", [99] * length)
    engine.recompute("a")
    engine.run()
    for index in (1, 2):
        expected = engine.expected(prompt, 7, seed=choice_seed(SEED, index))
        assert engine.tokens[f"a#{index}"] == expected[1:]
    assert engine.core.stats().prompt_tokens_computed == length + 1
    engine.core.assert_idle()


@pytest.mark.parametrize("index", [1, 2])
def test_a_fetch_goes_on_for_the_other_choice_when_one_is_aborted(index: int) -> None:
    engine = Engine()
    reserve_three(engine, PROMPT)
    engine.abort("a", index)
    engine.fill("a", PROMPT)
    engine.admit("a")
    engine.run()
    other = 3 - index
    assert engine.tokens[f"a#{other}"] == choice(engine, other, 7)[1:]
    assert f"a#{index}" not in engine.tokens
    engine.core.assert_idle()


def test_choices_of_a_reservation_that_differ_earlier_are_refused() -> None:
    engine = Engine()
    engine.reserve("a", PROMPT, (3, 4), greedy(7), siblings=(Sibling(1, (5, 4)),))
    assert isinstance(engine.failed["a"], InvalidRequest)
    engine.core.assert_idle()
