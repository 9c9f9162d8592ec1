"""Several choices of one request: one prompt, shared blocks, tokens of their own."""

from __future__ import annotations

import pytest
from engine_harness import Engine, greedy

from engine.messages import AddSequence, FirstTokens, ReserveSequence
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


# ---- Reservation ----


def firsts(engine: Engine, prompt: list[int], *indices: int) -> FirstTokens:
    return tuple((i, engine.first(prompt, seed=choice_seed(SEED, i))) for i in indices)


def assert_served(engine: Engine, prompt: list[int], *indices: int) -> None:
    """These choices, and no others, were decoded to their ends from the second token on."""
    names = {f"a#{i}" if i else "a": i for i in indices}
    assert engine.tokens.keys() == names.keys() == engine.finished.keys()
    for name, i in names.items():
        assert engine.tokens[name] == engine.expected(prompt, 7, seed=choice_seed(SEED, i))[1:]
    engine.core.assert_idle()


def test_a_reservation_has_a_seat_for_every_choice_and_one_set_of_blocks() -> None:
    engine = Engine(max_num_seqs=4)
    engine.reserve("a", PROMPT, seeded(7), n=3)
    engine.reserve("b", PROMPT, seeded(7), n=2)
    assert len(engine.allocated["a"].block_ids) == 3
    assert "b" not in engine.allocated
    engine.abort("a", 1)
    engine.step()
    assert "b" in engine.allocated
    engine.abort("a")
    engine.abort("b")
    engine.core.assert_idle()


def test_a_reservation_of_more_choices_than_seats_is_refused() -> None:
    engine = Engine(max_num_seqs=2)
    engine.reserve("a", PROMPT, n=3)
    assert isinstance(engine.failed["a"], InvalidRequest)
    engine.core.assert_idle()


@pytest.mark.parametrize("length", [7, 8, 9])
@pytest.mark.parametrize("indices", [(0, 1, 2), (1, 2), (0, 2), (1,)])
def test_one_fetch_serves_all_choices_that_go_on(length: int, indices: tuple[int, ...]) -> None:
    engine = Engine()
    prompt = PROMPT[:length]
    engine.reserve("a", prompt, seeded(7), n=3)
    engine.fill("a", prompt)
    engine.admit("a", firsts(engine, prompt, *indices))
    stats = engine.core.stats()
    assert (stats.num_running, stats.num_fetching) == (len(indices), 0)
    assert stats.prompt_tokens_transferred == length
    engine.run()
    assert engine.core.stats().prompt_tokens_computed == 0
    assert_served(engine, prompt, *indices)


@pytest.mark.parametrize("length", [7, 8, 9])
@pytest.mark.parametrize("indices", [(0, 1, 2), (1, 2), (0, 2), (1,)])
def test_a_failed_fetch_is_recomputed_once_for_all_choices_that_go_on(
    length: int, indices: tuple[int, ...]
) -> None:
    """Length 7: the first choice fills the block in which the others part from it."""
    engine = Engine()
    prompt = PROMPT[:length]
    engine.reserve("a", prompt, seeded(7), n=3)
    engine.fill("a", [99] * length)
    engine.recompute("a", firsts(engine, prompt, *indices))
    engine.run()
    assert engine.core.stats().prompt_tokens_computed == length + 1
    assert_served(engine, prompt, *indices)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest_first"])
def test_a_recompute_of_several_choices_may_come_while_the_reservation_still_waits(policy: str) -> None:
    engine = Engine(max_num_seqs=3, policy=policy)
    engine.reserve("first", PROMPT)
    engine.reserve("a", PROMPT, seeded(7), n=3)
    engine.recompute("a", firsts(engine, PROMPT, 1, 2))
    stats = engine.core.stats()
    assert (stats.num_reserving, stats.num_waiting, stats.num_waiting_tokens) == (0, 1, len(PROMPT) + 1)
    engine.run()
    assert engine.core.stats().num_fetching == 1, "two choices have a seat beside the first one"
    engine.abort("first")
    assert_served(engine, PROMPT, 1, 2)


def test_a_recomputed_group_that_is_preempted_before_its_birth_goes_on_as_one() -> None:
    engine = Engine(num_blocks=11, max_num_batched_tokens=8, enable_prefix_caching=False, policy="priority")
    engine.reserve("a", PROMPT, seeded(7), n=3, priority=1)
    engine.recompute("a", firsts(engine, PROMPT, 0, 1, 2))
    engine.step()
    engine.add("first", [9] * 36, greedy(2))
    engine.step()
    assert engine.core.stats().num_preemptions == 1
    engine.run()
    assert engine.finished.pop("first") is FinishReason.LENGTH
    del engine.tokens["first"]
    assert_served(engine, PROMPT, 0, 1, 2)


@pytest.mark.parametrize("command", ["admit", "recompute"])
@pytest.mark.parametrize("aborted", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_choices_that_were_aborted_stay_dropped_when_their_first_tokens_come(
    command: str, aborted: tuple[int, ...]
) -> None:
    """The prefill worker's word and the abort crossed."""
    engine = Engine()
    engine.reserve("a", PROMPT, seeded(7), n=3)
    for index in aborted:
        engine.abort("a", index)
    engine.fill("a", PROMPT)
    assert getattr(engine, command)("a", firsts(engine, PROMPT, 0, 1, 2)) == []
    engine.run()
    assert_served(engine, PROMPT, *sorted({0, 1, 2} - {*aborted}))


def test_an_aborted_choice_may_have_ended_with_its_first_token() -> None:
    engine = Engine()
    (stop,) = {token for _, token in firsts(engine, PROMPT, 1)}
    engine.reserve("a", PROMPT, seeded(7, stop_token_ids=(stop,)), n=2)
    engine.abort("a", 1)
    engine.fill("a", PROMPT)
    engine.admit("a", firsts(engine, PROMPT, 0, 1))
    assert not engine.failed
    engine.run()
    engine.core.assert_idle()


def test_a_first_token_that_ends_one_choice_fails_them_all() -> None:
    engine = Engine()
    (stop,) = {token for _, token in firsts(engine, PROMPT, 1)}
    engine.reserve("a", PROMPT, seeded(7, stop_token_ids=(stop,)), n=2)
    engine.fill("a", PROMPT)
    engine.admit("a", firsts(engine, PROMPT, 0, 1))
    assert isinstance(engine.failed["a"], InvalidRequest)
    engine.core.assert_idle()


@pytest.mark.parametrize("command", ["admit", "recompute"])
def test_choices_of_a_reservation_count_from_its_index(command: str) -> None:
    """Choices 3 and 4: the reservation's seed is that of choice 3."""
    engine = Engine()
    seeds = {3: SEED, 4: choice_seed(SEED, 1)}
    engine.reserve("a", PROMPT, seeded(7), n=2, index=3)
    engine.fill("a", PROMPT)
    tokens = tuple((i, engine.first(PROMPT, seed=seed)) for i, seed in seeds.items())
    getattr(engine, command)("a", tokens)
    engine.run()
    assert engine.tokens == {
        f"a#{i}": engine.expected(PROMPT, 7, seed=seed)[1:] for i, seed in seeds.items()
    }
    engine.core.assert_idle()


@pytest.mark.parametrize("index", [2, 5])
def test_a_first_token_for_a_choice_outside_the_reservation_fails_it(index: int) -> None:
    engine = Engine()
    engine.handle(ReserveSequence(SequenceId("a"), tuple(PROMPT), seeded(7), index=3, num_samples=2))
    engine.admit("a", ((3, 7), (index, 7)))
    assert isinstance(engine.failed["a"], InvalidRequest)
    engine.core.assert_idle()


@pytest.mark.parametrize("length", [8, 9])
def test_choices_of_a_reservation_part_behind_blocks_that_were_all_cached(length: int) -> None:
    engine = Engine()
    prompt = PROMPT[:length]
    engine.add("before", prompt, greedy(1))
    engine.run()
    engine.tokens.clear()
    engine.finished.clear()
    engine.reserve("a", prompt, seeded(7), n=3)
    assert engine.allocated["a"].num_cached_tokens == 8
    engine.fill("a", prompt)
    engine.admit("a", firsts(engine, prompt, 0, 1, 2))
    assert engine.core.stats().prompt_tokens_transferred == length - 8
    engine.run()
    assert_served(engine, prompt, 0, 1, 2)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_admitted_choices_are_preempted_each_for_itself(preemption: str) -> None:
    engine = Engine(num_blocks=6, preemption=preemption, num_host_blocks=20)
    engine.reserve("a", PROMPT, seeded(7), n=3)
    engine.fill("a", PROMPT)
    engine.admit("a", firsts(engine, PROMPT, 0, 1, 2))
    engine.run()
    assert engine.core.stats().num_preemptions > 0
    assert_served(engine, PROMPT, 0, 1, 2)
