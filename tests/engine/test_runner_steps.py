"""The runner: what a plan becomes, what it returns, and that it leaves sequences alone."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from tiny_models import BlockDealer, Twins, generate, make_prompt, make_twins, run_step

from engine.batch import make_layout
from engine.plan import Slice, StepPlan


@cache
def twins() -> Twins:
    return make_twins("smollm2")


def test_layout_places_rows_positions_and_slots() -> None:
    dealer = BlockDealer()
    decode, prefill = dealer.sequence(make_prompt(20), 4), dealer.sequence(make_prompt(50), 4)
    decode.num_computed, prefill.num_computed = 19, 14
    layout = make_layout([Slice(decode, 1), Slice(prefill, 4)], block_size=16, row_multiple=4)
    assert layout.query_starts.tolist() == [0, 1, 5]
    assert layout.context_lens.tolist() == [20, 18]
    assert layout.positions.tolist() == [19, 14, 15, 16, 17, 0, 0, 0]
    first, second = prefill.block_table[:2]
    expected = [
        decode.block_table[1] * 16 + 3,
        first * 16 + 14,
        first * 16 + 15,
        second * 16,
        second * 16 + 1,
    ]
    assert layout.slots.tolist() == [*expected, 0, 0, 0]
    assert layout.block_tables.tolist() == [decode.block_table[:2], prefill.block_table[:2]]


def test_tokens_come_in_the_order_of_the_plan_and_only_where_due() -> None:
    dealer = BlockDealer()
    whole, part, tail = (dealer.sequence(make_prompt(length), 4) for length in (10, 40, 30))
    runner = twins().new_runner()
    run_step(runner, [(tail, 25)])
    tokens = run_step(runner, [(whole, 10), (part, 20), (tail, 5)])
    assert [token is not None for token in tokens] == [True, False, True]
    alone = [
        generate(twins().new_runner(), [BlockDealer().sequence(make_prompt(n), 1)])[0][0] for n in (10, 30)
    ]
    assert [tokens[0], tokens[2]] == alone


def test_a_step_without_sampling_returns_no_token() -> None:
    assert run_step(twins().new_runner(), [(BlockDealer().sequence(make_prompt(40), 1), 16)]) == [None]


def test_an_empty_plan_is_an_empty_result() -> None:
    assert list(twins().new_runner().execute(StepPlan((), 0)).tokens) == []


def test_execute_reads_sequences_and_changes_none() -> None:
    sequence = BlockDealer().sequence(make_prompt(20), 4)
    before = (list(sequence.token_ids), sequence.num_computed, list(sequence.block_table), sequence.state)
    twins().new_runner().execute(StepPlan([Slice(sequence, 20)], 20))
    assert before == (sequence.token_ids, sequence.num_computed, sequence.block_table, sequence.state)


def test_only_own_blocks_and_the_null_block_are_written() -> None:
    runner = twins().new_runner()
    sequence = BlockDealer().sequence(make_prompt(37), 4)
    run_step(runner, [(sequence, 37)])
    written = runner._kv_cache.blocks.flatten(1).any(1).nonzero()[:, 0].tolist()
    assert set(written) - {0} == set(sequence.block_table[:3])


def test_warm_up_writes_to_the_null_block_only() -> None:
    runner = twins().new_runner()
    runner.warm_up()
    assert not runner._kv_cache.blocks[1:].any()


def test_seeded_sampling_is_the_same_in_any_company_and_any_chunks() -> None:
    settings = {"temperature": 0.9, "top_p": 0.95, "seed": 2**63 + 5, "logprobs": 2}
    alone = generate(twins().new_runner(), [BlockDealer().sequence(make_prompt(60), 8, **settings)])[0]
    dealer = BlockDealer()
    company = [
        dealer.sequence(make_prompt(7), 12),
        dealer.sequence(make_prompt(60), 8, **settings),
        dealer.sequence(make_prompt(90), 3, temperature=1.0, seed=1),
    ]
    assert generate(twins().new_runner(), company, chunk_size=11)[1] == alone


def test_a_resumed_sequence_continues_as_if_undisturbed() -> None:
    settings = {"temperature": 0.9, "seed": 77}
    whole = generate(twins().new_runner(), [BlockDealer().sequence(make_prompt(30), 10, **settings)])[0]
    first_leg = [token.token_id for token in whole[:4]]
    resumed = BlockDealer().sequence([*make_prompt(30), *first_leg], 10, **settings)
    resumed.num_prompt_tokens = 30
    assert generate(twins().new_runner(), [resumed])[0] == whole[4:]


def test_a_poisoned_cache_fails_its_own_slice_only() -> None:
    runner, dealer = twins().new_runner(), BlockDealer()
    poisoned, other = (dealer.sequence(make_prompt(length), 4) for length in (20, 30))
    run_step(runner, [(poisoned, 20), (other, 30)])
    runner._kv_cache.blocks[poisoned.block_table[0]] = float("nan")
    result = runner.execute(StepPlan([Slice(poisoned, 1), Slice(other, 1)], 2))
    assert set(result.failed) == {0}
    alone = generate(twins().new_runner(), [BlockDealer().sequence(make_prompt(30), 2)])[0]
    assert result.tokens[1] == alone[1]


def test_layout_arrays_have_the_types_that_kernels_take() -> None:
    layout = make_layout([Slice(BlockDealer().sequence(make_prompt(5), 1), 5)], 16, 1)
    int32 = (layout.query_starts, layout.context_lens, layout.block_tables)
    assert {array.dtype for array in int32} == {np.dtype(np.int32)}
    assert {array.dtype for array in (layout.positions, layout.slots)} == {np.dtype(np.int64)}
    assert torch.from_numpy(layout.slots).is_contiguous()
