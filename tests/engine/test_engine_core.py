"""The life of a sequence, from command to last event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest
from engine_harness import EOS, Engine, greedy

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.messages import (
    AddSequence,
    BlocksAllocated,
    Event,
    FirstTokens,
    PrefillProgressed,
    SequenceFailed,
    TokensSampled,
)
from engine.plan import StepPlan, StepResult
from protocol.errors import EngineFault, InvalidRequest
from protocol.generation import FinishReason, SamplingParams, Token
from protocol.ids import SequenceId

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
SEQ_A = SequenceId("a")


def sampled(events: list[Event]) -> list[TokensSampled]:
    return [event for event in events if isinstance(event, TokensSampled)]


# ---- Ends ----


def test_max_tokens_ends_with_length_and_frees_every_block() -> None:
    engine = Engine()
    engine.add("a", PROMPT, greedy(5))
    engine.run()
    assert engine.tokens["a"] == engine.expected(PROMPT, 5)
    assert engine.finished["a"] is FinishReason.LENGTH
    engine.core.assert_idle()


def test_max_tokens_one_gives_one_token() -> None:
    engine = Engine()
    engine.add("a", PROMPT, greedy(1))
    engine.run()
    assert len(engine.tokens["a"]) == 1
    engine.core.assert_idle()


def test_tokens_of_earlier_legs_count_and_are_followed_not_repeated() -> None:
    engine = Engine()
    whole = engine.expected(PROMPT, 8)
    engine.add("a", PROMPT, greedy(8), output=tuple(whole[:3]))
    engine.run()
    assert engine.tokens["a"] == whole[3:]


def test_the_context_length_ends_with_length() -> None:
    engine = Engine(max_model_len=13)
    engine.add("a", PROMPT, greedy(100))
    engine.run()
    assert len(engine.tokens["a"]) == 3
    assert engine.finished["a"] is FinishReason.LENGTH


def first_position_of(engine: Engine, token_id: int, num_tokens: int = 60) -> int:
    return engine.expected(PROMPT, num_tokens).index(token_id) + 1


def test_an_end_of_sequence_token_ends_with_stop() -> None:
    engine = Engine(vocab_size=8)
    engine.add("a", PROMPT, greedy(60, ignore_eos=False))
    engine.run()
    assert len(engine.tokens["a"]) == first_position_of(engine, EOS)
    assert engine.tokens["a"][-1] == EOS
    assert engine.finished["a"] is FinishReason.STOP
    engine.core.assert_idle()


def test_ignore_eos_goes_on_to_the_limit() -> None:
    engine = Engine(vocab_size=8)
    engine.add("a", PROMPT, greedy(60))
    engine.run()
    assert len(engine.tokens["a"]) == 60
    assert EOS in engine.tokens["a"]


def test_a_stop_token_ends_even_when_eos_is_ignored() -> None:
    engine = Engine(vocab_size=8)
    engine.add("a", PROMPT, greedy(60, stop_token_ids=(5,)))
    engine.run()
    assert len(engine.tokens["a"]) == first_position_of(engine, 5)
    assert engine.finished["a"] is FinishReason.STOP


def test_nothing_stops_before_min_tokens() -> None:
    engine = Engine(vocab_size=8)
    first = first_position_of(engine, EOS)
    engine.add("a", PROMPT, greedy(60, ignore_eos=False, min_tokens=first + 1))
    engine.run()
    assert len(engine.tokens["a"]) > first


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    engine = Engine(vocab_size=8)
    engine.add("a", PROMPT, greedy(first_position_of(engine, EOS), ignore_eos=False))
    engine.run()
    assert engine.finished["a"] is FinishReason.STOP


# ---- Refusals ----


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda e: e.add("a", []), "empty"),
        (lambda e: e.add("a", list(range(200))), "more than the model's context of 200"),
        (lambda e: e.add("a", PROMPT, greedy(0)), "complete already"),
        (lambda e: e.add("a", PROMPT, greedy(2), output=(1, 2)), "complete already"),
        (lambda e: e.add("a", PROMPT, greedy(9, ignore_eos=False), output=(1, EOS)), "complete already"),
        (lambda e: e.add("a", [1, -1]), "out of range"),
        (lambda e: e.reserve("a", PROMPT, greedy(0)), "complete already"),
        (lambda e: e.reserve("a", PROMPT, greedy(2), output=(1, 2)), "complete already"),
        (lambda e: e.reserve("a", list(range(200))), "more than the model's context of 200"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(
    refused: Callable[[Engine], list[Event]], message: str
) -> None:
    engine = Engine()
    refused(engine)
    assert isinstance(engine.failed["a"], InvalidRequest)
    assert message in engine.failed["a"].message
    assert not engine.core.has_work
    engine.core.assert_idle()


def test_a_sequence_that_could_outgrow_the_pool_is_refused() -> None:
    engine = Engine(num_blocks=6)  # 5 blocks of 4: 20 tokens with KV, and a last one without
    engine.add("fits", PROMPT, greedy(11))
    engine.add("never", PROMPT, greedy(12))
    assert isinstance(engine.failed["never"], InvalidRequest)
    engine.run()
    assert len(engine.tokens["fits"]) == 11
    engine.core.assert_idle()


def test_a_held_sequence_needs_room_for_its_prompt_only() -> None:
    engine = Engine(num_blocks=4)
    engine.add("a", PROMPT, greedy(100), hold=True)
    engine.run()
    assert len(engine.tokens["a"]) == 1
    engine.release("a")
    engine.core.assert_idle()


def test_an_id_in_use_is_refused_and_its_owner_goes_on() -> None:
    engine = Engine()
    engine.add("a", PROMPT, greedy(3))
    (event,) = engine.core.handle(AddSequence(SEQ_A, (1, 2), greedy(1)))
    assert isinstance(event, SequenceFailed)
    engine.run()
    assert engine.tokens["a"] == engine.expected(PROMPT, 3)


# ---- Hold: the prefill role ----


def test_a_held_sequence_tells_blocks_then_progress_then_its_token() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.add("a", PROMPT, hold=True)
    engine.run()
    allocated = engine.allocated["a"]
    assert [type(event) for event in engine.events] == [
        BlocksAllocated, PrefillProgressed, PrefillProgressed, TokensSampled,
    ]  # fmt: skip
    assert len(allocated.block_ids) == 3
    assert engine.progress["a"] == [8, 10]
    assert engine.tokens["a"] == engine.expected(PROMPT, 1)
    assert "a" not in engine.finished
    assert engine.core.stats().num_held == 1
    assert engine.core.stats().num_running == 0
    engine.release("a")
    engine.core.assert_idle()


def test_blocks_are_announced_before_the_device_starts_when_asked_for() -> None:
    """The reader's own queueing then overlaps with the prefill."""
    engine = Engine()
    engine.add("a", PROMPT, hold=True)
    told: list[tuple[int, list[Event]]] = []
    events = engine.core.step(announce=lambda early: told.append((len(engine.executor.plans), early)))
    ((num_plans_then, early),) = told
    assert num_plans_then == 0
    assert [type(event) for event in early] == [BlocksAllocated]
    assert BlocksAllocated not in [type(event) for event in events]


def test_held_blocks_keep_the_prompt_until_release_whatever_runs_beside() -> None:
    engine = Engine(num_blocks=13)
    engine.add("held", PROMPT, hold=True)
    engine.step()
    for i in range(4):
        engine.add(f"s{i}", [30 + i] * 6, greedy(20))
    engine.run()
    engine.executor.verify(engine.allocated["held"].block_ids, PROMPT, len(PROMPT))
    engine.release("held")
    engine.core.assert_idle()


def test_held_sequences_take_no_seat() -> None:
    engine = Engine(max_num_seqs=1)
    for name in "abc":
        engine.add(name, PROMPT, hold=True)
    engine.run()
    assert engine.core.stats().num_held == 3


def test_a_first_token_that_ends_the_sequence_frees_a_held_one_at_once() -> None:
    engine = Engine()
    first = engine.expected(PROMPT, 1)[0]
    engine.add("limit", PROMPT, greedy(1), hold=True)
    engine.add("stop", PROMPT, greedy(9, stop_token_ids=(first,)), hold=True)
    engine.run()
    assert engine.finished == {"limit": FinishReason.LENGTH, "stop": FinishReason.STOP}
    engine.core.assert_idle()


def test_a_held_sequence_reports_its_cached_prefix() -> None:
    engine = Engine()
    engine.add("a", PROMPT, hold=True)
    engine.run()
    engine.add("b", [*PROMPT, 1, 2, 3], hold=True)
    engine.run()
    assert engine.allocated["a"].num_cached_tokens == 0
    assert engine.allocated["b"].num_cached_tokens == 8
    assert engine.allocated["b"].block_ids[:2] == engine.allocated["a"].block_ids[:2]
    assert sampled(engine.events)[-1].num_cached_tokens == 8
    engine.release("a")
    engine.executor.verify(engine.allocated["b"].block_ids, [*PROMPT, 1, 2, 3], 13)
    engine.release("b")
    engine.core.assert_idle()


def test_a_release_before_the_first_token_stops_the_prefill() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.add("a", PROMPT, hold=True)
    engine.step()
    engine.release("a")
    assert not engine.core.has_work
    engine.core.assert_idle()


# ---- Reserve: the decode role ----


@pytest.mark.parametrize(("output", "num_blocks"), [((), 3), ((5, 6), 3), ((5, 6, 7), 4)])
def test_reserved_blocks_cover_prompt_and_earlier_output_and_come_at_once(
    output: tuple[int, ...], num_blocks: int
) -> None:
    engine = Engine()
    (event,) = engine.reserve("a", PROMPT, output=output)
    assert isinstance(event, BlocksAllocated)
    assert len(event.block_ids) == num_blocks
    assert event.num_cached_tokens == 0
    assert engine.core.stats().num_fetching == 1
    engine.step()
    assert engine.executor.plans == []


def test_an_admitted_sequence_decodes_without_computing_its_prompt() -> None:
    engine = Engine()
    engine.reserve("a", PROMPT, greedy(6))
    engine.fill("a", PROMPT)
    engine.admit("a", engine.first(PROMPT))
    engine.run()
    assert engine.executor.plans[0] == [("a", 1)]
    assert engine.tokens["a"] == engine.expected(PROMPT, 6)[1:]
    assert engine.core.stats().prompt_tokens_computed == 0
    engine.core.assert_idle()


@pytest.mark.parametrize("length", [7, 8, 9])
def test_prompts_around_a_block_boundary_decode_alike(length: int) -> None:
    engine = Engine()
    prompt = PROMPT[:length]
    engine.reserve("a", prompt, greedy(9))
    assert len(engine.allocated["a"].block_ids) == -(-length // 4)
    engine.fill("a", prompt)
    engine.admit("a", engine.first(prompt))
    engine.run()
    assert engine.tokens["a"] == engine.expected(prompt, 9)[1:]


@pytest.mark.parametrize("length", [7, 8, 9])
def test_a_resumed_one_decodes_after_its_earlier_output_and_the_first_token(length: int) -> None:
    engine = Engine()
    whole = engine.expected(PROMPT[:5], length)
    known, first = tuple(whole[: length - 5]), whole[length - 5]
    engine.reserve("a", PROMPT[:5], greedy(length), output=known)
    engine.fill("a", [*PROMPT[:5], *known])
    engine.admit("a", first)
    engine.run()
    assert engine.tokens["a"] == whole[length - 4 :]
    assert engine.finished["a"] is FinishReason.LENGTH
    assert engine.core.stats().prompt_tokens_transferred == length
    engine.core.assert_idle()


def test_reserved_blocks_enter_the_prefix_cache_only_when_admitted() -> None:
    engine = Engine()
    engine.reserve("a", PROMPT)
    engine.reserve("b", PROMPT)
    assert engine.allocated["b"].num_cached_tokens == 0
    engine.fill("a", PROMPT)
    engine.admit("a", 3)
    engine.reserve("c", PROMPT)
    assert engine.allocated["c"].num_cached_tokens == 8


def cached(engine: Engine, prompt: list[int]) -> int:
    """Have a prompt in the prefix cache; returns its first token."""
    engine.add("before", prompt, greedy(2))
    engine.run()
    return engine.tokens["before"][0]


def test_a_reservation_may_be_cached_up_to_all_it_needs() -> None:
    """Nothing of it is computed here, not even the last token: so nothing is left to fetch."""
    engine = Engine()
    first = cached(engine, PROMPT[:8])
    engine.reserve("b", PROMPT[:8], greedy(5))
    assert engine.allocated["b"].num_cached_tokens == 8
    engine.admit("b", first)
    engine.run()
    assert engine.tokens["b"] == engine.expected(PROMPT[:8], 5)[1:]
    assert engine.core.stats().prompt_tokens_transferred == 0
    engine.core.assert_idle()


def test_a_reservation_that_is_wholly_cached_may_be_recomputed_or_aborted() -> None:
    engine = Engine()
    first = cached(engine, PROMPT[:8])
    for name in "bc":
        engine.reserve(name, PROMPT[:8], greedy(5))
        assert engine.allocated[name].num_cached_tokens == 8
    engine.recompute("b", first)
    engine.abort("c")
    engine.run()
    assert engine.tokens["b"] == engine.expected(PROMPT[:8], 5)[1:]
    assert engine.core.stats().prompt_tokens_computed == 8, "the cache still has the prompt"
    engine.core.assert_idle()


def test_whoever_computes_its_next_token_still_computes_the_last_one_before() -> None:
    engine = Engine()
    cached(engine, PROMPT[:8])
    engine.add("b", PROMPT[:8], hold=True)
    engine.step()
    assert engine.allocated["b"].num_cached_tokens == 4
    assert engine.last_plan == [("b", 4)]
    engine.release("b")


def test_a_fetching_sequence_takes_a_seat() -> None:
    engine = Engine(max_num_seqs=1)
    engine.reserve("a", PROMPT)
    engine.reserve("b", PROMPT)
    assert "b" not in engine.allocated
    engine.abort("a")
    engine.step()
    assert "b" in engine.allocated


def test_a_reservation_waits_for_blocks_behind_those_before_it() -> None:
    engine = Engine(num_blocks=7, max_num_seqs=4)
    engine.reserve("a", PROMPT)
    engine.add("b", [40] * 13, greedy(2))  # 4 blocks: 3 are free
    engine.reserve("c", PROMPT)
    engine.step()
    assert "c" not in engine.allocated
    assert not engine.core.has_work
    engine.abort("a")
    engine.run()
    assert "b" in engine.finished
    assert "c" in engine.allocated
    engine.abort("c")
    engine.core.assert_idle()


def test_a_fetching_sequence_is_not_preempted_and_its_blocks_are_not_written() -> None:
    engine = Engine(num_blocks=9, max_num_seqs=4)
    engine.add("a", PROMPT[:4], greedy(20))
    engine.step()
    engine.reserve("b", PROMPT, greedy(9))
    engine.fill("b", PROMPT)
    engine.run()
    assert engine.core.stats().num_fetching == 1
    engine.executor.verify(engine.allocated["b"].block_ids, PROMPT, len(PROMPT))
    engine.admit("b", engine.first(PROMPT))
    engine.run()
    assert engine.tokens["a"] == engine.expected(PROMPT[:4], 20)
    assert engine.tokens["b"] == engine.expected(PROMPT, 9)[1:]
    engine.core.assert_idle()


def test_a_first_token_may_come_while_the_reservation_still_waits_but_not_an_admission() -> None:
    engine = Engine(max_num_seqs=1)
    engine.reserve("first", PROMPT)
    engine.reserve("a", PROMPT)
    engine.admit("a", 3)
    assert isinstance(engine.failed["a"], EngineFault)
    engine.abort("first")
    engine.core.assert_idle()


@pytest.mark.parametrize("state", ["reserving", "fetching"])
@pytest.mark.parametrize(
    ("sampling", "first", "message"),
    [
        (greedy(1), ((0, 7),), "complete with its first token"),
        (greedy(9, ignore_eos=False), ((0, EOS),), "complete with its first token"),
        (greedy(9, stop_token_ids=(7,)), ((0, 7),), "complete with its first token"),
        (greedy(9), ((1, 7),), "one for each choice"),
        (greedy(9), ((0, 7), (1, 7)), "one for each choice"),
        (greedy(9), ((0, 7), (0, 8)), "one for each choice"),
        (greedy(9), ((0, -1),), "out of range"),
        (greedy(9), ((0, 1 << 32),), "out of range"),
    ],
)
def test_a_first_token_that_cannot_be_fails_its_sequence_alone(
    state: str, sampling: SamplingParams, first: FirstTokens, message: str
) -> None:
    engine = Engine(max_num_seqs=2)
    engine.add("other", PROMPT, greedy(4))
    engine.step()
    if state == "reserving":
        engine.reserve("blocker", [9])
    engine.reserve("a", PROMPT, sampling)
    (engine.admit if state == "fetching" else engine.recompute)("a", first)
    assert isinstance(engine.failed["a"], InvalidRequest)
    assert message in engine.failed["a"].message
    engine.abort("blocker")
    engine.run()
    assert engine.tokens["other"] == engine.expected(PROMPT, 4)
    engine.core.assert_idle()


def test_a_first_token_before_the_minimal_length_ends_nothing() -> None:
    engine = Engine()
    first = engine.first(PROMPT)
    engine.reserve("a", PROMPT, greedy(4, stop_token_ids=(first,), min_tokens=2))
    engine.fill("a", PROMPT)
    engine.admit("a", first)
    engine.run()
    assert engine.tokens["a"][0] == engine.expected(PROMPT, 2)[1]
    engine.core.assert_idle()


@pytest.mark.parametrize("command", ["admit", "recompute"])
def test_a_reservation_none_of_whose_choices_goes_on_is_gone_and_not_answered(command: str) -> None:
    engine = Engine()
    engine.reserve("a", PROMPT, n=2)
    engine.fill("a", PROMPT)
    assert getattr(engine, command)("a", ()) == []
    assert not engine.core.has_work
    engine.core.assert_idle()


def test_a_recomputed_sequence_gives_the_same_tokens() -> None:
    engine = Engine()
    engine.reserve("a", PROMPT, greedy(6))
    engine.recompute("a", engine.first(PROMPT))
    engine.run()
    assert engine.tokens["a"] == engine.expected(PROMPT, 6)[1:]
    engine.core.assert_idle()


def test_a_recomputed_sequence_goes_before_those_that_came_later() -> None:
    engine = Engine(max_num_seqs=1)
    engine.reserve("a", PROMPT)
    engine.add("b", PROMPT)
    engine.recompute("a", 3)
    engine.step()
    assert engine.last_plan == [("a", 11)]


def test_a_recompute_may_come_while_the_reservation_still_waits() -> None:
    """The sender cannot know on which side of `BlocksAllocated` its command arrives."""
    engine = Engine(max_num_seqs=1)
    engine.reserve("first", PROMPT)
    engine.reserve("a", PROMPT, greedy(4))
    engine.recompute("a", engine.first(PROMPT))
    assert engine.core.stats().num_reserving == 0
    assert engine.core.stats().num_waiting == 1
    engine.abort("first")
    engine.run()
    assert "a" not in engine.allocated
    assert engine.tokens["a"] == engine.expected(PROMPT, 4)[1:]
    engine.core.assert_idle()


def test_recompute_leaves_nothing_of_the_failed_fetch_in_the_cache() -> None:
    engine = Engine()
    engine.reserve("a", PROMPT)
    engine.fill("a", [99] * len(PROMPT))  # a fetch that went wrong
    engine.recompute("a", 3)
    engine.step()
    assert engine.last_plan == [("a", 11)]


# ---- Aborts ----


def in_state(engine: Engine, state: str) -> None:
    match state:
        case "waiting":
            engine.add("a", PROMPT)
        case "prefilling":
            engine.add("a", [*PROMPT, *PROMPT, *PROMPT, *PROMPT], hold=True)
            engine.step()
        case "decoding":
            engine.add("a", PROMPT)
            engine.step()
            engine.step()
        case "held":
            engine.add("a", PROMPT, hold=True)
            engine.step()
        case "reserving":
            engine.reserve("blocker", PROMPT)
            engine.reserve("a", [9] * 150)
            engine.abort("blocker")
        case "fetching":
            engine.reserve("a", PROMPT)
        case "preempted":
            engine.add("first", [70] * 100, greedy(99))
            engine.add("a", [80] * 100, greedy(99))
            while not engine.core.stats().num_preemptions:
                engine.step()
            engine.abort("first")


@pytest.mark.parametrize(
    "state", ["waiting", "prefilling", "decoding", "held", "reserving", "fetching", "preempted"]
)
def test_an_abort_frees_everything_at_once_and_is_not_answered(state: str) -> None:
    engine = Engine(num_blocks=51, max_num_seqs=1 if state == "reserving" else 8)
    in_state(engine, state)
    assert engine.core.live_sequence_ids == ("a",)
    assert engine.abort("a") == []
    engine.core.assert_idle()
    assert not engine.core.has_work
    assert engine.step() == []
    assert engine.abort("a") == []


def test_commands_for_unknown_ids_are_ignored() -> None:
    engine = Engine()
    for command in (engine.abort, engine.release):
        assert command("ghost") == []
    for go_on in (engine.admit, engine.recompute):
        assert go_on("ghost", 3) == []


@pytest.mark.parametrize(("command", "more"), [("admit", [3]), ("recompute", [3]), ("release", [])])
def test_a_command_that_does_not_fit_the_state_fails_that_sequence_alone(
    command: str, more: list[int]
) -> None:
    engine = Engine()
    engine.add("a", PROMPT)
    engine.add("b", PROMPT, greedy(2))
    engine.step()
    getattr(engine, command)("a", *more)
    assert isinstance(engine.failed["a"], EngineFault)
    engine.run()
    assert engine.tokens["b"] == engine.expected(PROMPT, 2)
    engine.core.assert_idle()


def test_abort_all_reports_every_live_sequence() -> None:
    engine = Engine()
    engine.add("a", PROMPT, hold=True)
    engine.reserve("b", PROMPT)
    engine.step()
    error = EngineFault("the end")
    assert engine.core.abort_all(error) == [SequenceFailed(SequenceId(s), error) for s in "ab"]
    engine.core.assert_idle()


# ---- The core as a whole ----


def test_the_core_has_no_work_while_only_a_command_can_help() -> None:
    engine = Engine(num_blocks=4, max_num_seqs=2)
    engine.add("held", PROMPT, hold=True)
    engine.run()
    engine.add("b", PROMPT, greedy(1))
    assert engine.core.has_work
    engine.step()
    assert not engine.core.has_work
    engine.release("held")
    assert engine.core.has_work
    engine.run()
    engine.core.assert_idle()


def test_the_same_commands_give_the_same_events() -> None:
    def run() -> tuple[list[str], object]:
        engine = Engine(num_blocks=15, vocab_size=20)
        for i in range(6):
            engine.add(f"s{i}", [i % 2 + 1] * (5 + i), greedy(12, ignore_eos=False))
            engine.reserve(f"r{i}", [i + 3] * 5, greedy(4))
            engine.step()
            engine.recompute(f"r{i}", 4)
        engine.run()
        return [repr(event) for event in engine.events], engine.core.stats()

    assert run() == run()


def test_stats_tell_who_is_where_and_what_a_step_took() -> None:
    engine = Engine(max_num_batched_tokens=16, max_num_seqs=3)
    engine.add("held", PROMPT, hold=True)
    engine.step()
    engine.reserve("fetching", [7] * 5)
    engine.add("running", [8] * 24)
    engine.add("third", [9] * 4)
    engine.add("waiting", [5] * 6)
    engine.reserve("reserving", [6] * 5)
    engine.step()
    stats = engine.core.stats()
    assert (stats.num_held, stats.num_fetching, stats.num_running) == (1, 1, 1)
    assert (stats.num_waiting, stats.num_reserving) == (2, 1)
    assert stats.num_waiting_tokens == 8 + 4 + 6
    assert stats.blocks_total == 64
    assert stats.blocks_free == 64 - 3 - 2 - 4
    assert stats.blocks_cached == 2 + 4
    assert (stats.num_steps, stats.last_num_seqs, stats.last_num_tokens) == (2, 1, 16)
    assert (stats.prompt_tokens_computed, stats.generated_tokens) == (26, 1)
    assert stats.last_schedule_s == pytest.approx(0.001)
    assert stats.last_execute_s == pytest.approx(0.001)
    assert stats.last_apply_s == pytest.approx(0.001)
    assert stats.load.num_waiting == 3
    assert stats.load.num_held == 2
    with pytest.raises(FrozenInstanceError):
        stats.num_held = 0  # type: ignore[misc]


class _WrongExecutor:
    def __init__(self, tokens: list[Token | None]) -> None:
        self._tokens = tokens

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(self._tokens)


@pytest.mark.parametrize("tokens", [[], [None], [Token(1), Token(2)]])
def test_a_result_that_does_not_fit_the_plan_is_a_fault(tokens: list[Token | None]) -> None:
    config = SchedulerConfig(num_blocks=20, max_model_len=100)
    core = EngineCore(config, _WrongExecutor(tokens), frozenset(), lambda: 0.0)
    core.handle(AddSequence(SEQ_A, tuple(PROMPT), greedy()))
    with pytest.raises(EngineFault):
        core.step()
    assert core.live_sequence_ids == (SEQ_A,)


def test_an_idle_check_names_who_lives() -> None:
    engine = Engine()
    engine.add("a", PROMPT)
    with pytest.raises(EngineFault, match="a"):
        engine.core.assert_idle()
