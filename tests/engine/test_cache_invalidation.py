"""What nobody may hit any more after an invalidation, and what goes on undisturbed."""

from __future__ import annotations

from engine_harness import Engine, greedy

from engine import CacheInvalidated, TokensSampled

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19]
OTHER = [31, 32, 33, 34, 35, 36, 37, 38, 39]


def num_computed(engine: Engine, name: str, prompt: list[int], **more: object) -> int:
    """How many tokens of a prompt are not taken from the cache."""
    engine.add(name, prompt, greedy(1), **more)  # type: ignore[arg-type]
    engine.step()
    return dict(engine.last_plan)[name]


def test_everything_is_forgotten() -> None:
    engine = Engine()
    num_computed(engine, "a", PROMPT)
    num_computed(engine, "b", OTHER, salt="x")
    engine.invalidate()
    assert engine.core.stats().blocks_cached == 0
    assert engine.core.stats().invalidated_blocks == 4
    assert num_computed(engine, "c", PROMPT) == 9
    assert num_computed(engine, "d", OTHER, salt="x") == 9
    assert num_computed(engine, "e", PROMPT) == 1
    engine.core.assert_idle()


def test_a_prefix_is_forgotten_with_all_that_goes_on_from_it_and_others_stay() -> None:
    engine = Engine()
    num_computed(engine, "a", PROMPT)
    num_computed(engine, "b", [*PROMPT[:4], *OTHER[:5]])
    num_computed(engine, "c", OTHER)
    engine.invalidate(PROMPT[:6])
    assert num_computed(engine, "d", PROMPT) == 9
    assert num_computed(engine, "e", OTHER) == 1


def test_a_prefix_shorter_than_a_block_counts() -> None:
    engine = Engine()
    num_computed(engine, "a", PROMPT)
    num_computed(engine, "b", OTHER)
    engine.invalidate(PROMPT[:2])
    assert num_computed(engine, "c", PROMPT) == 9
    assert num_computed(engine, "d", OTHER) == 1


def test_only_the_named_salt_is_forgotten() -> None:
    engine = Engine()
    for salt in ("x", "y"):
        num_computed(engine, f"a{salt}", PROMPT, salt=salt)
    engine.invalidate(None, "x")
    assert num_computed(engine, "b", PROMPT, salt="x") == 9
    assert num_computed(engine, "c", PROMPT, salt="y") == 1
    engine.invalidate(PROMPT, None)
    assert num_computed(engine, "d", PROMPT, salt="y") == 9


def test_what_runs_goes_on_and_does_not_enter_the_cache_under_a_stale_name() -> None:
    engine = Engine()
    engine.add("a", PROMPT, greedy(10))
    engine.step()
    engine.invalidate()
    engine.run()
    assert engine.tokens["a"] == engine.expected(PROMPT, 10)
    assert engine.core.stats().blocks_cached == 0
    assert num_computed(engine, "b", PROMPT) == 9
    assert engine.core.stats().blocks_cached == 2


def test_a_first_block_that_is_not_complete_is_stale_too() -> None:
    engine = Engine(max_num_batched_tokens=8, block_size=16)
    engine.add("a", PROMPT, greedy(12))
    engine.step()
    engine.invalidate([*PROMPT, 77])  # nothing is cached of it, and the running one may become it
    engine.invalidate(PROMPT)
    engine.run()
    assert engine.core.stats().blocks_cached == 0


def test_a_fetch_that_was_under_way_stays_out_of_the_cache() -> None:
    engine = Engine()
    engine.reserve("a", PROMPT, greedy(3), n=2)
    engine.invalidate()
    engine.fill("a", PROMPT)
    engine.admit("a", ((0, engine.first(PROMPT)), (1, 9)))
    engine.run()
    assert engine.tokens["a"] == engine.expected(PROMPT, 3)[1:]
    assert num_computed(engine, "b", PROMPT) == 9


def test_a_sequence_that_starts_over_after_an_invalidation_may_use_the_cache_again() -> None:
    engine = Engine()
    engine.reserve("a", PROMPT, greedy(3))
    engine.invalidate()
    engine.recompute("a", engine.first(PROMPT))
    engine.run()
    assert num_computed(engine, "b", PROMPT) == 1


def test_a_swapped_sequence_comes_back_with_its_old_kv_alone() -> None:
    engine = Engine(num_blocks=11, max_num_seqs=4, preemption="swap", num_host_blocks=20)
    for name in "abc":
        engine.add(name, [ord(name), *PROMPT[:7]], greedy(16))
    while not engine.core.stats().num_swapped:
        engine.step()
    engine.invalidate()
    swapped_out = engine.core.stats().swapped_out_blocks
    engine.run()
    assert engine.core.stats().swapped_in_blocks >= swapped_out
    for name in "abc":
        assert engine.tokens[name] == engine.expected([ord(name), *PROMPT[:7]], 16)
    engine.core.assert_idle()


def test_what_is_to_be_handed_out_is_computed_again() -> None:
    """Its reader, on another worker, may have been told to forget before; it caches what it reads."""
    engine = Engine(max_num_batched_tokens=4, max_num_seqs=4)
    engine.add("a", PROMPT, greedy(2), hold=True)
    engine.step()
    first = engine.allocated["a"]
    engine.invalidate()
    engine.core.check_integrity()
    computed = []
    for _ in range(3):
        engine.step()
        computed += engine.last_plan
    assert computed == [("a", 4), ("a", 4), ("a", 1)]
    assert engine.allocated["a"] is not first
    assert num_computed(engine, "b", PROMPT) == 1, "what was computed afterwards is fresh"
    engine.release("a")
    engine.core.assert_idle()


def test_what_another_salt_hands_out_is_not_computed_again() -> None:
    engine = Engine(max_num_batched_tokens=4, max_num_seqs=4)
    engine.add("a", PROMPT, greedy(2), hold=True, salt="x")
    engine.step()
    engine.invalidate(PROMPT, "y")
    engine.step()
    engine.step()
    assert engine.core.stats().num_held == 1
    engine.release("a")
    engine.core.assert_idle()


def test_the_answer_names_those_that_are_held_with_stale_kv() -> None:
    engine = Engine(max_num_seqs=4)
    for name, prompt, salt in (("a", PROMPT, "x"), ("b", PROMPT, "y"), ("c", OTHER, "x")):
        engine.add(name, prompt, greedy(2), hold=True, salt=salt)
    engine.step()
    answers = [engine.invalidate(prompt, salt)[0] for prompt, salt in ((PROMPT, "x"), (None, None))]
    assert [answer.stale_held for answer in answers if isinstance(answer, CacheInvalidated)] == [
        ("a",),
        ("a", "b", "c"),
    ]
    for name in "abc":
        engine.release(name)
    engine.core.assert_idle()


# ---- What counts as cached ----


def hits_told(engine: Engine, seq_id: str) -> set[int]:
    return {
        e.num_cached_tokens for e in engine.events if isinstance(e, TokensSampled) and e.seq_id == seq_id
    }


def test_what_a_prefill_computes_anew_after_an_invalidation_was_not_cached() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.add("warm", PROMPT, greedy(1))
    engine.run()
    engine.add("a", [*PROMPT, *[7] * 20], greedy(5), hold=True)
    engine.step()
    engine.invalidate()
    engine.run()
    assert engine.allocated["a"].num_cached_tokens == 0
    assert hits_told(engine, "a") == {0}


def test_what_is_cached_again_by_others_meanwhile_counts() -> None:
    engine = Engine(max_num_batched_tokens=8, max_num_seqs=2, policy="priority")
    engine.add("warm", PROMPT, greedy(1))
    engine.run()
    engine.add("a", [*PROMPT, *[7] * 20], greedy(5), hold=True)
    engine.step()
    engine.invalidate()
    engine.add("b", PROMPT, greedy(1), priority=-1)
    engine.add("c", OTHER, greedy(1), priority=-1)
    engine.run()
    assert hits_told(engine, "a") == {8}


def test_a_prefix_that_is_lost_before_the_first_token_was_not_cached() -> None:
    """The prefill is preempted, and its blocks are evicted."""
    engine = Engine(num_blocks=17, max_num_batched_tokens=8, policy="priority")
    engine.add("warm", PROMPT, greedy(1))
    engine.run()
    engine.add("a", [*PROMPT, *[7] * 20], greedy(5), priority=1)
    engine.step()
    engine.add("urgent", list(range(100, 158)), greedy(5))
    engine.run()
    assert engine.core.stats().num_preemptions == 1
    assert hits_told(engine, "a") == {0}


def test_a_prefix_that_is_lost_after_the_first_token_was_cached() -> None:
    engine = Engine(num_blocks=17, policy="priority")
    engine.add("warm", PROMPT, greedy(1))
    engine.run()
    engine.add("a", [*PROMPT, *[7] * 20], greedy(5), priority=1)
    engine.step()
    engine.add("urgent", list(range(100, 158)), greedy(5))
    engine.run()
    assert engine.core.stats().num_preemptions == 1
    assert hits_told(engine, "a") == {8}
