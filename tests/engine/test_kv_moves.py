"""Blocks on the move: swapped to the host and back, copied within the cache, and in which order."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import CPU, SMALL, BlockDealer, Twins, generate, make_prompt, make_twins, run_step

from engine.host_kv_pool import HostKvPool
from engine.kv_cache import KvCache, _independent_runs
from engine.model import ModelConfig
from engine.plan import Slice, StepPlan
from engine.runner import ModelRunner
from protocol.errors import EngineFault, StartupError
from protocol.ids import BlockId, HostBlockId

CONFIG = ModelConfig.from_hf({**SMALL, "architectures": ["LlamaForCausalLM"]})
Moves = list[tuple[BlockId, BlockId]]


@cache
def twins() -> Twins:
    return make_twins("smollm2")


def make_cache(num_blocks: int = 8, dtype: torch.dtype = torch.float32) -> KvCache:
    """Block i is full of the number i."""
    kv_cache = KvCache(CONFIG, num_blocks=num_blocks, block_size=16, dtype=dtype, device=CPU)
    kv_cache.blocks += torch.arange(num_blocks).view(-1, 1, 1, 1, 1, 1)
    return kv_cache


def contents(blocks: torch.Tensor) -> list[float]:
    """The number that fills each block."""
    flat = blocks.flatten(1).float()
    assert (flat == flat[:, :1]).all()
    return flat[:, 0].tolist()


def swapping_runner(num_host_blocks: int = 20) -> ModelRunner:
    kv_cache = twins().new_runner()._kv_cache
    pool = HostKvPool(kv_cache, num_host_blocks)
    return ModelRunner(twins().model, kv_cache, twins().config.eos_token_ids, pool)


def pairs(*numbers: tuple[int, int]) -> Moves:
    return [(BlockId(source), BlockId(destination)) for source, destination in numbers]


MOVES = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=12)


@given(MOVES)
def test_copies_give_what_one_after_the_other_gives(numbers: list[tuple[int, int]]) -> None:
    kv_cache, expected = make_cache(), [float(i) for i in range(8)]
    for source, destination in numbers:
        expected[destination] = expected[source]
    kv_cache.copy_blocks(pairs(*numbers))
    assert contents(kv_cache.blocks) == expected


@given(MOVES, st.randoms())
def test_the_moves_of_a_run_may_be_done_in_any_order(
    numbers: list[tuple[int, int]], order: random.Random
) -> None:
    """A GPU copies many blocks at once."""
    moves, blocks, shuffled = pairs(*numbers), list(range(8)), list(range(8))
    runs = list(_independent_runs(moves))
    assert [move for run in runs for move in run] == moves
    for source, destination in moves:
        blocks[destination] = blocks[source]
    for run in runs:
        order.shuffle(run)
        for source, destination in run:
            shuffled[destination] = shuffled[source]
    assert shuffled == blocks


def test_copies_of_one_block_to_many_are_one_run() -> None:
    moves = pairs((1, 2), (1, 3), (4, 5))
    assert list(_independent_runs(moves)) == [moves]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swapped_blocks_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    kv_cache = KvCache(CONFIG, num_blocks=6, block_size=16, dtype=dtype, device=CPU)
    kv_cache.blocks.normal_(generator=torch.Generator().manual_seed(0))
    before, pool = kv_cache.blocks.clone(), HostKvPool(kv_cache, 4)
    pool.swap_out([(BlockId(2), HostBlockId(3)), (BlockId(5), HostBlockId(0))])
    kv_cache.blocks.fill_(float("nan"))
    pool.swap_in([(HostBlockId(0), BlockId(1)), (HostBlockId(3), BlockId(4))])
    assert torch.equal(kv_cache.blocks[[4, 1]], before[[2, 5]])
    assert kv_cache.blocks[[0, 2, 3, 5]].isnan().all()


def test_a_plan_swaps_out_then_in_then_copies_each_in_order() -> None:
    kv_cache = make_cache()
    runner = ModelRunner(twins().model, kv_cache, (), HostKvPool(kv_cache, 2))
    plan = StepPlan(
        (),
        0,
        copies=pairs((2, 3), (3, 4)),
        swaps_out=[(BlockId(6), HostBlockId(1)), (BlockId(7), HostBlockId(1))],
        swaps_in=[(HostBlockId(1), BlockId(6)), (HostBlockId(1), BlockId(2))],
    )
    assert list(runner.execute(plan).tokens) == []
    assert contents(kv_cache.blocks) == [0, 1, 7, 7, 7, 5, 7, 7]


def test_moves_are_done_before_the_slices_are_computed() -> None:
    """The slice reads blocks that this very step brings, and writes into a copy."""
    prompt, runner, dealer = make_prompt(40), swapping_runner(), BlockDealer()
    alone = generate(twins().new_runner(), [BlockDealer().sequence(prompt, 6)])[0]
    sequence = dealer.sequence(prompt, 6)
    tokens = run_step(runner, [(sequence, 40)])
    old, new = sequence.block_table[:3], dealer.sequence(prompt, 6).block_table[:3]
    on_host = [HostBlockId(i) for i in (4, 9, 2)]
    runner.execute(StepPlan((), 0, swaps_out=list(zip(old, on_host, strict=True))))
    runner._kv_cache.blocks.fill_(float("nan"))
    parked = dealer.sequence(prompt, 6).block_table[0]
    sequence.block_table[:3] = new
    plan = StepPlan(
        [Slice(sequence, 1)],
        1,
        swaps_in=[(on_host[0], new[0]), (on_host[1], new[1]), (on_host[2], parked)],
        copies=[(parked, new[2])],
    )
    tokens += list(runner.execute(plan).tokens)
    sequence.num_computed += 1
    assert tokens[1] is not None
    sequence.token_ids.append(tokens[1].token_id)
    while sequence.num_output_tokens < 6:
        tokens += run_step(runner, [(sequence, 1)])
    assert tokens == alone


def test_a_copied_block_parts_two_sequences_that_shared_it() -> None:
    prompt, runner, dealer = make_prompt(37), twins().new_runner(), BlockDealer()
    settings = {"temperature": 1.0, "logprobs": 3}
    alone = [
        generate(twins().new_runner(), [BlockDealer().sequence(prompt, 8, seed=seed, **settings)])[0]
        for seed in (1, 2)
    ]
    first, second = (dealer.sequence(prompt, 8, seed=seed, **settings) for seed in (1, 2))
    first.siblings.append(second)
    result = runner.execute(StepPlan([Slice(first, 37)], 37))
    firsts = [result.tokens[0], result.siblings[0][0]]
    first.siblings = []
    second.block_table[:2] = first.block_table[:2]
    runner.execute(StepPlan((), 0, copies=[(first.block_table[2], second.block_table[2])]))
    for sequence, token in zip((first, second), firsts, strict=True):
        assert token is not None
        sequence.num_computed = 37
        sequence.token_ids.append(token.token_id)
    rest = generate(runner, [first, second])
    assert [[token, *others] for token, others in zip(firsts, rest, strict=True)] == alone


@pytest.mark.parametrize("moves", [{"swaps_out": [(1, 0)]}, {"swaps_in": [(0, 1)]}], ids=str)
def test_a_swap_without_a_host_pool_is_a_fault(moves: dict[str, list[tuple[int, int]]]) -> None:
    with pytest.raises(EngineFault, match="host pool"):
        twins().new_runner().execute(StepPlan((), 0, **moves))  # type: ignore[arg-type]


def test_the_host_pool_has_the_blocks_of_the_cache() -> None:
    kv_cache = make_cache(dtype=torch.bfloat16)
    pool = HostKvPool(kv_cache, 3)
    assert pool.num_blocks == 3
    assert pool.num_bytes == 3 * kv_cache.block_bytes
    assert pool.blocks.dtype is torch.bfloat16
    assert pool.blocks.is_contiguous()


@pytest.mark.parametrize(("num_blocks", "message"), [(0, "at least one"), (10**12, "no room")])
def test_a_host_pool_that_cannot_be_is_refused(num_blocks: int, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        HostKvPool(make_cache(), num_blocks)
