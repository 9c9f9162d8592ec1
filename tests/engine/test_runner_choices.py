"""Several choices from one row of logits, and the log-probabilities of prompts."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tiny_models import VOCAB_SIZE, BlockDealer, Twins, generate, make_prompt, make_twins, run_step

from engine.ops import Linear, TorchOps
from engine.plan import Slice, StepPlan
from engine.runner import ModelRunner
from engine.sampling.prompt_scores import MAX_ROWS
from engine.sequence import Sequence
from protocol.generation import Token, choice_seed

SETTINGS: dict[str, Any] = {"temperature": 0.9, "top_p": 0.97, "logprobs": 2}


@cache
def twins() -> Twins:
    return make_twins("smollm2")


def choices_of(dealer: BlockDealer, prompt: list[int], num_choices: int, seed: int) -> Sequence:
    parent, *siblings = (
        dealer.sequence(prompt, 4, seed=choice_seed(seed, i), **SETTINGS) for i in range(num_choices)
    )
    for sibling in siblings:
        sibling.block_table = []
    parent.siblings = siblings
    return parent


def first_token(prompt: list[int], seed: int) -> Token:
    sequence = BlockDealer().sequence(prompt, 1, seed=seed, **SETTINGS)
    return generate(twins().new_runner(), [sequence])[0][0]


# Siblings


def test_each_sibling_gets_the_token_that_its_seed_gives_alone() -> None:
    dealer, prompt = BlockDealer(), make_prompt(45)
    parent, other = choices_of(dealer, prompt, 5, seed=77), choices_of(dealer, make_prompt(9), 3, seed=3)
    lonely = dealer.sequence(make_prompt(20), 4, seed=5, **SETTINGS)
    slices = [Slice(lonely, 20), Slice(parent, 45), Slice(other, 9)]
    result = twins().new_runner().execute(StepPlan(slices, 74))
    assert result.tokens == [first_token(make_prompt(20), 5), first_token(prompt, 77), *result.tokens[2:]]
    assert set(result.siblings) == {1, 2}
    assert list(result.siblings[1]) == [first_token(prompt, choice_seed(77, i)) for i in range(1, 5)]
    assert list(result.siblings[2]) == [first_token(make_prompt(9), choice_seed(3, i)) for i in (1, 2)]
    assert len({token.token_id for token in result.siblings[1]}) > 1


def test_progress_of_a_step_shows_while_it_lasts() -> None:
    """A long step looks like a dead engine from outside, but for this."""
    seen: list[int] = []

    class WatchedOps(TorchOps):
        def gated(self, x: torch.Tensor, gate_up: Linear) -> torch.Tensor:
            seen.append(runner.progress)
            return super().gated(x, gate_up)

    watched = make_twins("smollm2", ops=WatchedOps(torch.device("cpu"), torch.float32))
    runner = watched.new_runner()
    runner.execute(StepPlan([Slice(BlockDealer().sequence(make_prompt(20), 1), 20)], 20))
    assert seen == list(range(watched.config.num_layers))


def test_siblings_wait_until_their_parent_samples() -> None:
    parent = choices_of(BlockDealer(), make_prompt(45), 3, seed=8)
    runner = twins().new_runner()
    result = runner.execute(StepPlan([Slice(parent, 30)], 30))
    assert list(result.tokens) == [None]
    assert result.siblings == {}
    parent.num_computed = 30
    result = runner.execute(StepPlan([Slice(parent, 15)], 15))
    assert list(result.siblings[0]) == [first_token(make_prompt(45), choice_seed(8, i)) for i in (1, 2)]


def test_siblings_after_a_resumption_count_the_output_in_their_penalties() -> None:
    """Choices that part late, e.g. one that was aborted before: all have the same output so far."""
    runner, dealer = twins().new_runner(), BlockDealer()
    token_ids = [*make_prompt(20), 5, 5, 9]
    penalties = {"frequency_penalty": 1.5, "temperature": 0.8}
    parent, sibling, alone = (dealer.sequence(token_ids, 9, seed=s, **penalties) for s in (1, 2, 2))
    for sequence in (parent, sibling, alone):
        sequence.num_prompt_tokens = 20
    parent.siblings = [sibling]
    result = runner.execute(StepPlan([Slice(parent, 23)], 23))
    assert list(result.siblings[0]) == run_step(runner, [(alone, 23)])


# Prompt log-probabilities


def score(
    runner: ModelRunner, sequence: Sequence, chunk_size: int, company: list[Sequence] | None = None
) -> list[Token]:
    """Run the prompt in chunks, each beside one chunk of everybody else."""
    scored: list[Token] = []
    while sequence.num_computed < sequence.num_prompt_tokens:
        count = min(chunk_size, sequence.num_prompt_tokens - sequence.num_computed)
        parts = [(other, 3) for other in company or []] + [(sequence, count)]
        result = runner.execute(StepPlan([Slice(*part) for part in parts], sum(c for _, c in parts)))
        for part in parts:
            part[0].num_computed += part[1]
        scored += result.prompt_logprobs.get(len(parts) - 1, ())
    return scored


def test_prompt_logprobs_are_those_of_transformers() -> None:
    prompt = make_prompt(MAX_ROWS + 50)
    scored = score(twins().new_runner(), BlockDealer().sequence(prompt, 1, prompt_logprobs=3), 1 << 30)
    with torch.inference_mode():
        expected = torch.log_softmax(twins().reference(torch.tensor([prompt])).logits[0].float(), -1)
    assert [token.token_id for token in scored] == prompt[1:]
    for position, token in enumerate(scored):
        assert token.logprob == pytest.approx(float(expected[position, prompt[position + 1]]), abs=1e-3)
        values, ids = expected[position].topk(3)
        assert [pair[0] for pair in token.top_logprobs] == ids.tolist()
        assert [pair[1] for pair in token.top_logprobs] == pytest.approx(values.tolist(), abs=1e-3)


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 150])
def test_neither_chunks_nor_company_change_a_bit_of_prompt_logprobs(chunk_size: int) -> None:
    prompt = make_prompt(60 if chunk_size == 1 else 2 * MAX_ROWS + 3)
    whole = score(
        twins().new_runner(), BlockDealer().sequence(prompt, 1, prompt_logprobs=VOCAB_SIZE), 1 << 30
    )
    dealer = BlockDealer()
    company = [
        dealer.sequence(make_prompt(300), 1),
        dealer.sequence(make_prompt(301), 1, prompt_logprobs=2),
    ]
    sequence = dealer.sequence(prompt, 1, prompt_logprobs=VOCAB_SIZE)
    assert score(twins().new_runner(), sequence, chunk_size, company) == whole


def test_scores_are_told_per_slice_that_asks_and_no_further_than_the_prompt() -> None:
    runner, dealer = twins().new_runner(), BlockDealer()
    one, two, none, short = (make_prompt(length) for length in (30, 40, 20, 1))
    begun = dealer.sequence([*two, 7, 8, 9], 9, prompt_logprobs=0)
    begun.num_prompt_tokens = 40
    slices = [
        Slice(dealer.sequence(none, 1), 20),
        Slice(dealer.sequence(one, 1, prompt_logprobs=1), 10),
        Slice(begun, 43),
        Slice(dealer.sequence(short, 1, prompt_logprobs=1), 1),
    ]
    scores = runner.execute(StepPlan(slices, 74)).prompt_logprobs
    assert set(scores) == {1, 2}
    assert [token.token_id for token in scores[1]] == one[1:11]
    assert [token.token_id for token in scores[2]] == two[1:]
    assert {len(token.top_logprobs) for token in scores[1]} == {1}
    assert {token.top_logprobs for token in scores[2]} == {()}


def test_positions_that_were_told_before_a_preemption_are_not_scored_again() -> None:
    runner = twins().new_runner()
    sequence = BlockDealer().sequence(make_prompt(30), 1, prompt_logprobs=1)
    sequence.num_scored = 20
    assert runner.execute(StepPlan([Slice(sequence, 20)], 20)).prompt_logprobs == {}
    sequence.num_computed = 15
    assert len(runner.execute(StepPlan([Slice(sequence, 15)], 15)).prompt_logprobs[0]) == 14


def test_decodes_of_a_scored_sequence_score_nothing() -> None:
    runner = twins().new_runner()
    sequence = BlockDealer().sequence(make_prompt(30), 3, prompt_logprobs=1)
    run_step(runner, [(sequence, 30)])
    assert runner.execute(StepPlan([Slice(sequence, 1)], 1)).prompt_logprobs == {}


def test_a_prompt_without_finite_scores_fails_its_slice() -> None:
    runner = twins().new_runner()
    sequence = BlockDealer().sequence(make_prompt(30), 1, prompt_logprobs=1)
    run_step(runner, [(sequence, 16)])
    runner._kv_cache.blocks[sequence.block_table[0]] = float("nan")
    assert set(runner.execute(StepPlan([Slice(sequence, 5)], 5)).failed) == {0}


# Every feature at once

EVERYTHING: dict[str, Any] = {
    "temperature": 1.2,
    "top_p": 0.98,
    "top_k": 200,
    "min_p": 0.001,
    "seed": 2**63 + 9,
    "logprobs": 4,
    "stop_token_ids": (11, 12),
    "min_tokens": 7,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.7,
    "repetition_penalty": 1.2,
    "logit_bias": ((20, 1.5), (21, -2.0)),
    "bad_words": ((30,), (31, 32)),
}


@pytest.mark.parametrize("num_before", [1, 5, 8, 13])
def test_a_run_resumed_anywhere_with_every_feature_is_the_undisturbed_one(num_before: int) -> None:
    prompt = make_prompt(30)
    # What is forbidden, biased or penalised matters: the plain run chooses otherwise.
    plain = generate(
        twins().new_runner(), [BlockDealer().sequence(prompt, 14, temperature=1.2, seed=2**63 + 9)]
    )[0]
    bad = {
        "bad_words": (
            (plain[0].token_id,),
            (plain[0].token_id, plain[1].token_id),
            *EVERYTHING["bad_words"],
        )
    }
    settings = {**EVERYTHING, **bad}
    whole = generate(twins().new_runner(), [BlockDealer().sequence(prompt, 14, **settings)])[0]
    assert [token.token_id for token in whole] != [token.token_id for token in plain]
    dealer = BlockDealer()
    resumed = dealer.sequence([*prompt, *(token.token_id for token in whole[:num_before])], 14, **settings)
    resumed.num_prompt_tokens = 30
    company = [
        dealer.sequence(make_prompt(50), 14, **{**settings, "seed": 5, "repetition_penalty": 0.7}),
        dealer.sequence(make_prompt(51), 14, temperature=1.0, seed=6),
        dealer.sequence(make_prompt(52), 14),
    ]
    assert generate(twins().new_runner(), [*company[:2], resumed, company[2]], 13)[2] == whole[num_before:]
