"""Captured decode steps say what unpadded ones say, whoever joins or leaves, and leave no wait behind."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import torch
from tiny_models import BLOCK_SIZE, CPU, BlockDealer, Twins, generate, make_prompt, make_twins, run_step
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from traced_work import CannotCapture, capture_trace, run_again

from engine.captured_decoding import Capture, CapturedDecoding, bucket_sizes
from engine.kv_cache import KvCache
from engine.model.partition import Whole
from engine.ops import Recording, TorchOps
from engine.ops.triton import TritonOps, Tuning
from engine.ops.triton.tuning import Tile
from engine.runner import ModelRunner
from protocol.errors import EngineFault

TUNING = Tuning(Tile(128, 4, 1), Tile(128, 4, 1, queries=64), num_multiprocessors=0)
JOINS = {0: 3, 2: 6, 3: 4, 5: 14, 9: 1}
"""Step -> length of the prompt that joins."""
LENGTH = {3: 8, 6: 4, 4: 8, 14: 4, 1: 5}
"""Length of the prompt -> tokens that it decodes."""

SIZES = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


@cache
def twins() -> Twins:
    """Small: every row and head of a step is a program, and programs take the interpreter milliseconds."""
    return make_twins("llama", ops=TritonOps(TUNING), **SIZES)


def make_cache() -> KvCache:
    return KvCache(twins().config, num_blocks=40, block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU)


def make_runner(capture: Capture | None) -> ModelRunner:
    return ModelRunner(
        twins().model, make_cache(), twins().config.eos_token_ids, capture=capture, max_sequences=4
    )


def decode_with(capture: Capture | None) -> list[list[int]]:
    """The tokens of sequences that join and leave; alone in their steps without a `capture`."""
    runner, dealer = make_runner(capture), BlockDealer(40)
    live, done = [], []
    for step in range(15):
        if step in JOINS:
            prompt = make_prompt(JOINS[step])
            joining = dealer.sequence(prompt, LENGTH[len(prompt)])
            run_step(runner, [(joining, len(prompt))])
            live.append(joining)
        together = [[(each, 1) for each in live]] if capture else [[(each, 1)] for each in live]
        for parts in together if live else []:
            run_step(runner, parts)
        done += [each for each in live if each.num_output_tokens > each.sampling.max_tokens]
        live = [each for each in live if each not in done]
    return [each.token_ids for each in done]


@pytest.mark.timeout(600)  # 10 s, and minutes on a machine with other work
def test_replayed_steps_give_the_tokens_of_each_sequence_alone() -> None:
    expected = decode_with(None)
    assert len(expected) == len(JOINS)
    assert decode_with(capture_trace) == expected


def capture_work(seen: list[int]) -> Capture:
    def capture(work):
        with FakeTensorMode(allow_non_fake_inputs=True):
            seen.append(work().shape[0])
        return Recording(torch.zeros(seen[-1], twins().config.vocab_size), lambda: None)

    return capture


def test_a_step_neither_waits_nor_has_shapes_that_depend_on_numbers() -> None:
    seen: list[int] = []
    CapturedDecoding(twins().model, make_cache().blocks, capture_work(seen), 4).warm_up()
    assert seen == [4, 2, 1]


def test_planted_waits_are_caught() -> None:
    x = torch.ones(4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(DataDependentOutputException):
            (x * 2).sum().item()
        with pytest.raises(DynamicOutputShapeException):
            (x * 2)[x * 2 > 1]
    for work in (lambda: x * (x * 2).sum().item(), lambda: x[x > 0]):
        with pytest.raises(CannotCapture):
            capture_trace(work)


@pytest.mark.parametrize("capture", [run_again, capture_trace])
def test_capturing_and_padding_touch_no_block(capture: Capture) -> None:
    kv_cache = make_cache()
    kv_cache.blocks.fill_(3.0)
    decoding = CapturedDecoding(twins().model, kv_cache.blocks, capture, 2)
    decoding.warm_up()
    assert (kv_cache.blocks == 3.0).all()
    sequence = BlockDealer(40).sequence([5, 6], 2)
    own = sequence.block_table[0]
    decoding.logits([sequence])
    changed = (kv_cache.blocks != 3.0).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [own]


def test_ops_that_cannot_be_captured_are_told_apart() -> None:
    model = make_twins("llama", ops=TorchOps(CPU, torch.float32), num_hidden_layers=1).model
    decoding = CapturedDecoding(model, torch.zeros(4, 1, 2, 2, BLOCK_SIZE, 16), run_again, 2)
    with pytest.raises(EngineFault, match="cannot be captured"):
        decoding.warm_up()


class PartOfSeveral(Whole):
    is_whole = False


def test_nothing_is_captured_where_other_ranks_have_a_part() -> None:
    def capture(work):
        raise AssertionError

    twins = make_twins("llama", **SIZES)
    twins.model.partition = PartOfSeveral()
    kv_cache = KvCache(twins.config, num_blocks=9, block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU)
    ModelRunner(twins.model, kv_cache, (), capture=capture, max_sequences=2).warm_up()


def test_a_runner_warms_all_buckets_up() -> None:
    sizes = []

    def capture(work):
        recording = run_again(work)
        sizes.append(len(recording.output))
        return recording

    runner = make_runner(capture)
    runner.warm_up()
    assert sizes == [4, 2, 1]
    generate(runner, [BlockDealer(40).sequence([5, 6], 2)])
    assert sizes == [4, 2, 1]


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256, 300, 1024])
def test_buckets_are_few_and_near(most: int) -> None:
    sizes = bucket_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    assert len(sizes) <= 64
    assert all(larger <= 2 * smaller for smaller, larger in pairwise(sizes))
