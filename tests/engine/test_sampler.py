"""The sampler: right distributions, the same token whoever else is in the batch, and the edge cases."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cpp_variants import best_ops
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import Sampler, draw_with_torch, uniforms
from engine.sampling.adjustments import adjust
from engine.sampling.draw import _invert
from engine.sequence import Sequence
from protocol.generation import SamplingParams, Token
from protocol.ids import SequenceId

VOCAB_SIZE = 1000
EOS = 2
UINT64_MAX = 2**64 - 1


def make_sequence(
    prompt: list[int] | None = None, output: list[int] | None = None, **sampling: Any
) -> Sequence:
    prompt, output = prompt or [1], output or []
    return Sequence(
        seq_id=SequenceId("s"),
        sampling=SamplingParams(max_tokens=100, **sampling),
        token_ids=prompt + output,
        num_prompt_tokens=len(prompt),
    )


def random_logits(
    rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0, scale: float = 3.0
) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.fixture(params=["torch", "cpp"], autouse=True)
def way_to_draw(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test here is run with both ways to draw."""
    draw = best_ops(torch.float32).draw if request.param == "cpp" else draw_with_torch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Used, "sampler", Sampler((EOS,), draw))
        yield


class Used:
    sampler = Sampler((EOS,))


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> list[Token | None]:
    return Used.sampler.sample(logits.clone(), sequences)


def sample_all(logits: torch.Tensor, sequences: list[Sequence]) -> list[Token]:
    """Every row must give one."""
    tokens = [token for token in sample(logits, sequences) if token is not None]
    assert len(tokens) == len(sequences)
    return tokens


def sample_ids(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    return [token.token_id for token in sample_all(logits, sequences)]


def draw_many(row: torch.Tensor, num_draws: int, **sampling: Any) -> np.ndarray:
    """Token counts over `num_draws` seeds: [vocab]."""
    sequences = [make_sequence(seed=seed, **sampling) for seed in range(num_draws)]
    return np.bincount(sample_ids(row.expand(num_draws, -1), sequences), minlength=len(row))


def assert_fits(counts: np.ndarray, probabilities: torch.Tensor) -> None:
    """Chi-square over the tokens that are expected at least 5 times, at six sigma; seeds are fixed."""
    expected = probabilities.double().numpy() * counts.sum()
    assert counts[expected == 0].sum() == 0
    big = expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    used = wanted > 0
    statistic = (((observed - wanted) ** 2)[used] / wanted[used]).sum()
    freedom = used.sum() - 1
    assert statistic < freedom + 6 * math.sqrt(2 * freedom) + 1e-9


# Noise


def test_noise_is_a_function_of_seed_and_position_alone() -> None:
    together = uniforms([7, 8, UINT64_MAX], [1, 5, 99])
    assert together.tolist() == [uniforms([s], [p])[0] for s, p in ((7, 1), (8, 5), (UINT64_MAX, 99))]


def test_noise_is_splitmix64_of_the_mixed_seed_plus_position_times_golden_ratio() -> None:
    """A resumed sequence may meet a worker of another version: the numbers are part of the wire."""

    def mix(state: int) -> int:
        state = (state + 0x9E3779B97F4A7C15) & UINT64_MAX
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & UINT64_MAX
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & UINT64_MAX
        return state ^ (state >> 31)

    seeds, positions = [0, 1, UINT64_MAX], [0, 1, 123456]
    states = [
        (mix(seed) + position * 0x9E3779B97F4A7C15) & UINT64_MAX
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert uniforms(seeds, positions).tolist() == [((mix(s) >> 16) + 0.5) / 2**48 for s in states]


@pytest.mark.parametrize("along", ["seed", "position"])
def test_noise_is_uniform_and_uncorrelated(along: str) -> None:
    steps, fixed = list(range(20000)), [12345] * 20000
    noise = uniforms(steps, fixed) if along == "seed" else uniforms(fixed, steps)
    counts = np.histogram(noise, bins=50, range=(0, 1))[0]
    assert_fits(counts, torch.full((50,), 1 / 50))
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.03
    assert noise.min() > 0
    assert noise.max() < 1


def test_neighbouring_seeds_share_no_noise_at_shifted_positions() -> None:
    table = uniforms(np.repeat(np.arange(100), 100).tolist(), np.tile(np.arange(100), 100).tolist())
    assert len(np.unique(table)) == len(table)


# Distributions


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_gives_the_softmax_of_scaled_logits(temperature: float) -> None:
    row = random_logits(1, 60)[0]
    counts = draw_many(row, 5000, temperature=temperature)
    assert_fits(counts, torch.softmax(row / temperature, -1))


def test_top_k_keeps_the_k_likeliest() -> None:
    row = random_logits(1, 60)[0]
    cut = torch.full_like(row, -math.inf)
    best = row.topk(5).indices
    cut[best] = row[best]
    assert_fits(draw_many(row, 3000, top_k=5), torch.softmax(cut, -1))


@pytest.mark.parametrize(
    ("vocab_size", "top_p"), [(60, 0.3), (60, 0.999), (2000, 0.3), (2000, 0.9), (9000, 0.9)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(top_p: float, vocab_size: int) -> None:
    """With many nearly equal logits the nucleus is larger than the candidates looked at first."""
    row = random_logits(1, vocab_size, scale=3.0 if vocab_size == 60 else 0.3)[0]
    probabilities = torch.softmax(row, -1)
    ranked, order = probabilities.sort(descending=True)
    kept = order[: int((ranked.double().cumsum(0) < top_p).sum()) + 1]
    expected = torch.zeros_like(probabilities)
    expected[kept] = probabilities[kept]
    assert_fits(draw_many(row, 1000, top_p=top_p), expected / expected.sum())


def test_top_p_acts_on_what_top_k_left() -> None:
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    counts = draw_many(row, 2000, top_k=2, top_p=0.57)
    assert_fits(counts, torch.tensor([1.0, 0.0, 0.0, 0.0]))
    counts = draw_many(row, 2000, top_k=2, top_p=0.58)
    assert_fits(counts, torch.tensor([4 / 7, 3 / 7, 0.0, 0.0]))


def test_large_top_k_with_top_p_looks_past_the_candidates() -> None:
    row = torch.zeros(2000)
    row[:1000] = 0.5
    counts = draw_many(row, 1500, top_k=1000, top_p=0.5)
    # All of the best thousand are equally likely, and ties with the last one kept are kept.
    assert counts[1000:].sum() == 0
    assert (counts[:1000] > 0).sum() > 600


def test_min_p_is_relative_to_the_likeliest() -> None:
    row = torch.tensor([0.5, 0.26, 0.14, 0.1]).log()
    assert_fits(draw_many(row, 3000, min_p=0.25), torch.tensor([0.5, 0.26, 0.14, 0.0]) / 0.9)


def test_noise_next_to_one_takes_the_last_token_that_can_be() -> None:
    """Rounded to float32, such noise times the total is the total itself."""
    probabilities = torch.tensor([[0.25, 0.5, 0.25, 0.0], [0.0, 0.0, 1.0, 0.0]])
    assert _invert(probabilities, torch.full((2,), 1 - 2.0**-49, dtype=torch.float64)) == [2, 2]
    assert _invert(probabilities, torch.full((2,), 2.0**-49, dtype=torch.float64)) == [0, 2]


# Independence


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "temperature": 0.7, "top_p": 0.9},
    {"seed": 3, "top_k": 40, "logprobs": 3},
    {"seed": 4, "top_k": 400, "top_p": 0.95},
    {"seed": 5, "min_p": 0.1, "presence_penalty": 1.0},
    {"seed": 6, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 0},
    {"temperature": 0.0, "logit_bias": ((5, 50.0),), "logprobs": 5},
    {"seed": 8, "min_tokens": 5, "stop_token_ids": (9, 10)},
    {"seed": UINT64_MAX, "top_p": 0.999, "temperature": 1.5},
    {"seed": 10, "bad_words": ((5, 6, 6, 40), (6, 41), (42,), ()), "logit_bias": ((7, 2.5), (8, -1.0))},
    {
        "seed": 11,
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 300,
        "min_p": 1e-4,
        "logprobs": 7,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 0.8,
        "logit_bias": ((5, 1.0), (999, 3.0)),
        "min_tokens": 4,
        "stop_token_ids": (7,),
        "bad_words": ((6, 6), (3,)),
    },
]


@pytest.mark.parametrize("scale", [0.2, 3.0])
def test_no_row_depends_on_the_others(scale: float) -> None:
    logits = random_logits(len(MIXED), scale=scale)
    sequences = [make_sequence([3, 4, 5], [5, 6, 6], **params) for params in MIXED]
    together = sample(logits, sequences)
    alone = [sample(logits[i : i + 1], [sequence])[0] for i, sequence in enumerate(sequences)]
    assert together == alone
    backwards = sample(logits.flip(0), sequences[::-1])
    assert together == backwards[::-1]


def test_the_token_follows_from_seed_and_position_not_from_the_prompt() -> None:
    row = random_logits(1)
    prompt_only = make_sequence([1, 2, 3, 4], [], seed=11)
    with_output = make_sequence([1, 2], [9, 9], seed=11)
    later = make_sequence([1, 2, 3, 4], [9], seed=11)
    assert sample_ids(row, [prompt_only]) == sample_ids(row, [with_output])
    assert sample_ids(row, [prompt_only]) != sample_ids(row, [later])


PARAMETERS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, UINT64_MAX),
        "temperature": st.floats(0, 100),
        "top_p": st.floats(1e-9, 1),
        "top_k": st.integers(0, 1200),
        "min_p": st.floats(0, 1),
    }
)


@settings(max_examples=60, deadline=None)
@given(params=PARAMETERS, scale=st.sampled_from([0.0, 1e-3, 1.0, 1e4]))
def test_any_parameters_give_a_token_of_positive_probability(params: dict[str, Any], scale: float) -> None:
    row = random_logits(1, seed=params["seed"] % 1000, scale=scale)
    row[0, ::2] = -math.inf
    assert sample_ids(row, [make_sequence(**params)])[0] % 2 == 1


# Edge cases


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    row = torch.zeros(1, VOCAB_SIZE)
    row[0, [700, 30, 999]] = 1.0
    assert sample_ids(row, [make_sequence(temperature=0.0)]) == [30]


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-6}, {"min_p": 1.0}])
def test_the_narrowest_settings_are_greedy(params: dict[str, Any]) -> None:
    row = random_logits(1)
    for seed in range(20):
        assert sample_ids(row, [make_sequence(seed=seed, **params)]) == [int(row.argmax())]


def test_a_small_temperature_makes_no_infinities() -> None:
    row = random_logits(1) * 1e4
    assert sample_ids(row, [make_sequence(temperature=1e-5)]) == [int(row.argmax())]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.2}])
def test_the_only_finite_logit_is_taken(params: dict[str, Any]) -> None:
    row = torch.full((1, VOCAB_SIZE), -math.inf)
    row[0, 123] = -5.0
    assert sample_ids(row, [make_sequence(**params)]) == [123]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.5, "min_p": 0.1}]
)
def test_broken_logits_give_no_token_and_harm_no_other_row(bad: float, params: dict[str, Any]) -> None:
    logits = random_logits(3)
    sequences = [make_sequence(seed=i, **params) for i in range(3)]
    healthy = sample(logits, sequences)
    logits[1, 500] = bad
    assert sample(logits, sequences) == [healthy[0], None, healthy[2]]


def test_nothing_to_choose_gives_no_token() -> None:
    assert sample(torch.full((1, VOCAB_SIZE), -math.inf), [make_sequence()]) == [None]


def test_no_sequences_give_no_tokens() -> None:
    assert sample(torch.empty(0, VOCAB_SIZE), []) == []


# Adjustments


def test_penalties_follow_their_definitions() -> None:
    row = torch.zeros(1, 10)
    row[0, :4] = torch.tensor([4.0, 3.5, -1.0, 1.0])
    repeated = {"repetition_penalty": 2.0}
    # Token 0 was in the prompt: 4 / 2 is less than 3.5.
    assert sample_ids(row, [make_sequence([0], [], temperature=0.0, **repeated)]) == [1]
    # Presence and frequency do not count the prompt, and frequency counts each occurrence.
    assert sample_ids(row, [make_sequence([0], [], temperature=0.0, presence_penalty=2.0)]) == [0]
    assert sample_ids(row, [make_sequence([5], [0], temperature=0.0, presence_penalty=1.0)]) == [1]
    assert sample_ids(row, [make_sequence([5], [0], temperature=0.0, frequency_penalty=0.4)]) == [0]
    assert sample_ids(row, [make_sequence([5], [0, 0], temperature=0.0, frequency_penalty=0.4)]) == [1]


def test_repetition_penalty_lowers_negative_logits_too() -> None:
    row = torch.tensor([[-1.0, -1.5, -9.0]])
    assert sample_ids(row, [make_sequence([0], [], temperature=0.0, repetition_penalty=2.0)]) == [1]


def test_logit_bias_moves_the_choice() -> None:
    row = random_logits(1)
    assert sample_ids(row, [make_sequence(temperature=0.0, logit_bias=((77, 100.0),))]) == [77]
    best = int(row.argmax())
    assert sample_ids(row, [make_sequence(temperature=0.0, logit_bias=((best, -100.0),))]) != [best]


def test_no_end_before_min_tokens() -> None:
    row = random_logits(1)
    row[0, EOS], row[0, 9] = 50.0, 40.0
    ends = {"temperature": 0.0, "stop_token_ids": (9,), "min_tokens": 2}
    assert sample_ids(row, [make_sequence([1], [], **ends)])[0] not in {EOS, 9}
    assert sample_ids(row, [make_sequence([1], [5], **ends)])[0] not in {EOS, 9}
    assert sample_ids(row, [make_sequence([1], [5, 5], **ends)]) == [EOS]


def test_a_bad_word_is_banned_only_after_the_rest_of_it() -> None:
    row = torch.zeros(1, 10)
    row[0, 7], row[0, 3] = 5.0, 4.0
    greedy: dict[str, Any] = {"temperature": 0.0}
    two_tokens = {**greedy, "bad_words": ((4, 7),)}
    assert sample_ids(row, [make_sequence([1], [4], **two_tokens)]) == [3]
    assert sample_ids(row, [make_sequence([1], [4, 5], **two_tokens)]) == [7]
    # What the prompt ends with is not the output's doing.
    assert sample_ids(row, [make_sequence([1, 4], [], **two_tokens)]) == [7]
    three_tokens = {**greedy, "bad_words": ((4, 4, 7),)}
    assert sample_ids(row, [make_sequence([4], [4], **three_tokens)]) == [7]
    assert sample_ids(row, [make_sequence([4], [4, 4], **three_tokens)]) == [3]
    assert sample_ids(row, [make_sequence([1], [], **greedy, bad_words=((7,),))]) == [3]


def test_a_banned_token_is_never_drawn() -> None:
    row = torch.zeros(8)
    counts = draw_many(row, 2000, bad_words=((1,), (2,)), min_tokens=5, stop_token_ids=(3,))
    assert counts[[1, 2, 3]].sum() == 0
    assert (counts[[0, 4, 5, 6, 7]] > 0).all()


def test_a_request_that_bans_everything_gets_a_token_and_breaks_nothing() -> None:
    everything = tuple((token_id,) for token_id in range(VOCAB_SIZE))
    sequences = [
        make_sequence(bad_words=everything, seed=1),
        make_sequence(bad_words=everything, temperature=0.0),
        make_sequence(min_tokens=3, stop_token_ids=tuple(range(VOCAB_SIZE)), top_p=0.5, min_p=0.1),
    ]
    assert all(0 <= token_id < VOCAB_SIZE for token_id in sample_ids(random_logits(3), sequences))


def test_ids_outside_the_vocabulary_change_nobodys_logits() -> None:
    outside = (-1, VOCAB_SIZE, VOCAB_SIZE + 7)
    logits = random_logits(3)
    strange = make_sequence(
        temperature=0.0,
        bad_words=tuple((token_id,) for token_id in outside),
        logit_bias=tuple((token_id, 100.0) for token_id in outside),
        min_tokens=5,
        stop_token_ids=outside,
    )
    plain = make_sequence(temperature=0.0)
    assert sample_ids(logits, [plain, strange, plain]) == logits.argmax(-1).tolist()


ADJUSTMENTS = st.fixed_dictionaries(
    {
        "presence_penalty": st.sampled_from([0.0, 0.5, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.3, -0.7]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.6]),
        "logit_bias": st.dictionaries(st.integers(0, 29), st.floats(-100, 100), max_size=4).map(
            lambda biases: tuple(biases.items())
        ),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(st.integers(0, 29), max_size=3).map(tuple),
        "bad_words": st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=4).map(tuple),
    }
)


def adjusted_one_by_one(row: list[float], sequence: Sequence) -> list[float]:
    """The definitions, token by token."""
    params, output = sequence.sampling, sequence.token_ids[sequence.num_prompt_tokens :]
    result = list(row)
    for token_id in set(sequence.token_ids):
        factor = params.repetition_penalty
        result[token_id] = result[token_id] / factor if result[token_id] > 0 else result[token_id] * factor
    for token_id in set(output):
        result[token_id] -= params.frequency_penalty * output.count(token_id) + params.presence_penalty
    for token_id, bias in params.logit_bias:
        result[token_id] += bias
    banned = {EOS, *params.stop_token_ids} if len(output) < params.min_tokens else set()
    for word in params.bad_words:
        if word and (len(word) == 1 or output[-len(word) + 1 :] == list(word[:-1])):
            banned.add(word[-1])
    return [-1e30 if token_id in banned else value for token_id, value in enumerate(result)]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), min_size=1, max_size=5),
            st.lists(st.integers(0, 5), max_size=6),
            ADJUSTMENTS,
        ),
        min_size=1,
        max_size=5,
    )
)
def test_a_batch_is_adjusted_as_the_definitions_say(
    rows: list[tuple[list[int], list[int], dict[str, Any]]],
) -> None:
    sequences = [make_sequence(prompt, output, **params) for prompt, output, params in rows]
    logits = random_logits(len(rows), 30)
    expected = [adjusted_one_by_one(row.tolist(), s) for row, s in zip(logits, sequences, strict=True)]
    adjust(logits, sequences, (EOS,))
    torch.testing.assert_close(logits, torch.tensor(expected), rtol=1e-5, atol=1e-5)


EXTREMES = [0.0, -1.0, 1.0, 1e-300, -1e-300, 1e300, -1e300, math.inf, -math.inf, math.nan]


@settings(max_examples=150, deadline=None)
@given(
    params=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from(EXTREMES),
            "top_p": st.sampled_from(EXTREMES),
            "top_k": st.sampled_from([0, 1, 2**31 - 1, 2**32 - 1, -1]),
            "min_p": st.sampled_from(EXTREMES),
            "presence_penalty": st.sampled_from(EXTREMES),
            "frequency_penalty": st.sampled_from(EXTREMES),
            "repetition_penalty": st.sampled_from(EXTREMES),
            "logit_bias": st.lists(
                st.tuples(st.integers(0, 2**32 - 1) | st.integers(0, 29), st.sampled_from(EXTREMES)),
                max_size=30,
            ).map(tuple),
            "logprobs": st.sampled_from([None, 0, 20, 2**32 - 1]),
            "seed": st.sampled_from([0, UINT64_MAX]),
            "min_tokens": st.sampled_from([0, 2**32 - 1]),
            "stop_token_ids": st.sampled_from([(), tuple(range(30)), (2**32 - 1,)]),
        }
    )
)
def test_no_parameters_break_the_sampler_or_touch_another_row(params: dict[str, Any]) -> None:
    """Each worker trusts its router, but one that errs must not end all that others have running."""
    logits = random_logits(3, 30)
    plain = make_sequence([1], [2], seed=5)
    tokens = sample_all(logits, [plain, make_sequence([1, 3], [4, 4, 7], **params), plain])
    assert 0 <= tokens[1].token_id < 30
    alone = sample_all(logits[[0, 2]], [plain, plain])
    assert [tokens[0], tokens[2]] == alone


# Log-probabilities


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    row = random_logits(1)
    expected = torch.log_softmax(row[0], -1)
    sequence = make_sequence([3], [4], temperature=0.3, top_k=5, presence_penalty=1.0, logprobs=4, seed=3)
    token = sample_all(row, [sequence])[0]
    assert token.logprob == pytest.approx(float(expected[token.token_id]))
    values, ids = expected.topk(4)
    assert [token_id for token_id, _ in token.top_logprobs] == ids.tolist()
    assert [logprob for _, logprob in token.top_logprobs] == pytest.approx(values.tolist())


def test_logprobs_of_biased_logits_are_the_unbiased_ones() -> None:
    row = random_logits(1)
    token = sample_all(row, [make_sequence(temperature=0.0, logit_bias=((77, 100.0),), logprobs=0)])[0]
    assert token.logprob == pytest.approx(float(torch.log_softmax(row[0], -1)[77]))
    assert token.top_logprobs == ()


def test_logprobs_come_only_where_asked_for() -> None:
    tokens = sample_all(random_logits(2), [make_sequence(), make_sequence(logprobs=2)])
    assert tokens[0].logprob is None
    assert len(tokens[1].top_logprobs) == 2


def test_equal_logprobs_are_listed_by_id() -> None:
    token = sample_all(torch.zeros(1, 4), [make_sequence(temperature=0.0, logprobs=9)])[0]
    assert [token_id for token_id, _ in token.top_logprobs] == [0, 1, 2, 3]


def test_equal_logprobs_at_the_edge_of_the_list_are_the_lowest_ids() -> None:
    """Whoever else is in the batch: a sort for more of the best orders equal ones otherwise."""
    row = torch.zeros(1, VOCAB_SIZE)
    row[0, 500] = 1.0
    sequences = [make_sequence(logprobs=count) for count in (4, 0, 20, 999, 1)]
    tokens = sample_all(row.expand(5, -1), sequences)
    best = [[token_id for token_id, _ in token.top_logprobs] for token in tokens]
    ranking = [500, *(token_id for token_id in range(VOCAB_SIZE) if token_id != 500)]
    assert best == [ranking[:count] for count in (4, 0, 20, 999, 1)]
