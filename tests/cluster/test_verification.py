"""What `splitserve verify` calls a difference, a tie and a success."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from cluster.config import load_config
from cluster.verification import Case, compare, greedy_cases, seeded_cases, verify_answers
from cluster.verification.cases import PROMPT_LENGTHS
from cluster.verification.compare import first_difference
from cluster.verification.remote import base_url
from cluster.verify import VerifyOptions, _require_judge, verify
from protocol.errors import StartupError, WorkerUnavailable

TEXT = list(range(100))


def test_prompts_have_the_lengths_around_a_block_and_fit_the_context() -> None:
    cases = greedy_cases(TEXT, 64, 48, limit=1024)
    lengths = {len(case.prompt_token_ids) for case in cases}
    assert lengths == {min(n, 1024 - 48) for n in PROMPT_LENGTHS}
    assert all(case.sampling.temperature == 0 for case in cases)
    assert len({case.prompt_token_ids for case in cases}) > 50


def test_seeded_cases_all_have_seeds_of_their_own() -> None:
    seeds = [case.sampling.seed for case in seeded_cases(greedy_cases(TEXT, 20, 4, 1024))]
    assert len(set(seeds)) == 20


def test_an_early_end_is_a_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [1]) == 0


def test_the_first_differing_position_is_reported_with_both_tokens() -> None:
    cases = greedy_cases(TEXT, 2, 4, 1024)
    found = compare("a = b", cases, [[1, 2], [3, 4]], [[1, 2], [3, 5, 6]])
    assert [str(m) for m in found.mismatches] == [
        "prompt 1 (15 tokens) differs first at output token 1: token 4 against token 5"
    ]
    assert str(found) == "a = b: 1 of 2 identical"


def test_a_tie_of_the_reference_is_counted_and_not_reported() -> None:
    cases = greedy_cases(TEXT, 1, 4, 1024)
    asked: list[list[int]] = []

    def is_tie(case: Case, output: Sequence[int]) -> bool:
        asked.append(list(output))
        return True

    found = compare("a = b", cases, [[1, 2, 3]], [[1, 2, 9]], is_tie)
    assert found.is_equal
    assert found.num_ties == 1
    assert asked == [[1, 2]]


async def test_a_wrong_token_of_the_cluster_fails_the_verification() -> None:
    async def right(cases: Sequence[Case]) -> list[list[int]]:
        return [[1, 2] for _ in cases]

    async def wrong(cases: Sequence[Case]) -> list[list[int]]:
        return [[1, 2] for _ in cases[1:]] + [[1, 3]]

    cases = greedy_cases(TEXT, 3, 2, 1024)
    good = await verify_answers(
        cases, cluster=right, colocated=right, reference=right, is_tie=None, say=lambda _: None
    )
    bad = await verify_answers(
        cases, cluster=wrong, colocated=right, reference=right, is_tie=None, say=lambda _: None
    )
    assert good.is_equal
    assert not bad.is_equal
    assert any("differs first at output token 1" in line for line in bad.lines())


async def test_only_ranks_that_add_up_otherwise_are_excused_for_a_tie() -> None:
    async def one(cases: Sequence[Case]) -> list[list[int]]:
        return [[1, 2] for _ in cases]

    async def other(cases: Sequence[Case]) -> list[list[int]]:
        return [[1, 3] for _ in cases]

    cases = greedy_cases(TEXT, 2, 2, 1024)
    for adds_up_alike in (True, False):
        found = await verify_answers(
            cases,
            cluster=one,
            colocated=other,
            reference=one,
            is_tie=lambda case, output: True,
            adds_up_alike=adds_up_alike,
            say=lambda _: None,
        )
        assert found.is_equal is not adds_up_alike


def test_ranks_in_bfloat16_are_not_judged_without_the_reference() -> None:
    config = load_config(None, {"tensor_parallel_size": 2})
    with pytest.raises(StartupError, match="leave --no-reference out"):
        _require_judge(config, "bfloat16", VerifyOptions(with_reference=False))
    _require_judge(config, "float32", VerifyOptions(with_reference=False))
    _require_judge(config, "bfloat16", VerifyOptions())
    staged = load_config(None, {"pipeline_parallel_size": 2})
    _require_judge(staged, "bfloat16", VerifyOptions(with_reference=False))


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_server_may_be_named_as_clients_name_it(url: str) -> None:
    assert base_url(url) == "http://h:1"


def test_a_url_without_its_scheme_is_refused() -> None:
    with pytest.raises(StartupError, match="must begin with http"):
        base_url("localhost:8000")


def test_a_server_that_does_not_answer_is_found_before_any_model_is_loaded() -> None:
    options = VerifyOptions(url="http://127.0.0.1:1/v1")
    config = load_config(None, {"model": "/no/such/model"})
    with pytest.raises(WorkerUnavailable, match=r"http://127\.0\.0\.1:1 does not answer"):
        verify(config, options, Console(file=io.StringIO()))
