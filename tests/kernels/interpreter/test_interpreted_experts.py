"""Experts on a GPU: grouped products give what single ones give, and whole models the same tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import BlockDealer, generate, make_prompt, make_twins

from engine.captured_decoding import CapturedDecoding
from engine.ops import LinearStack, Ops, Recording, TorchOps
from engine.ops.triton import TritonOps, Tuning
from engine.ops.triton.tuning import Tile
from engine.runner import ModelRunner

TILE = Tile(64, 4, 1, queries=16)
GROUPED = TritonOps(Tuning(TILE, TILE, num_multiprocessors=1, groups_experts=True))
APART = TritonOps(Tuning(TILE, TILE, num_multiprocessors=1))
ORACLE = TorchOps(torch.device("cpu"), torch.float32)
HIDDEN, NUM_EXPERTS = 32, 5


def pack(ops: Ops, gate_ups: torch.Tensor, downs: torch.Tensor) -> tuple[LinearStack, LinearStack]:
    return ops.pack_gate_ups(gate_ups, len(gate_ups)), ops.pack_downs(downs, len(downs))


def random_experts(inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(NUM_EXPERTS, 2 * inner, HIDDEN) * 0.2, torch.randn(NUM_EXPERTS, HIDDEN, inner) * 0.2


@pytest.mark.parametrize("ops", [GROUPED, APART], ids=["grouped", "apart"])
@pytest.mark.parametrize("inner", [24, 21])
@pytest.mark.parametrize("rows", [2, 18])
def test_experts_are_those_of_torch(ops: TritonOps, rows: int, inner: int) -> None:
    gate_ups, downs = random_experts(inner)
    x, routing = torch.randn(rows, HIDDEN), ORACLE.route(torch.randn(rows, NUM_EXPERTS), 2, normalizes=True)
    expected = ORACLE.experts(x, routing, *pack(ORACLE, gate_ups, downs))
    actual = ops.experts(x, routing, *pack(ops, gate_ups, downs))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("held", [slice(0, 2), slice(2, 5)])
def test_what_experts_elsewhere_would_give_is_zero_whatever_memory_holds(
    held: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped products leave the rows of nobody as they find them."""
    gate_ups, downs = random_experts(24)
    x, routing = torch.randn(18, HIDDEN), ORACLE.route(torch.randn(18, NUM_EXPERTS), 2, normalizes=True)
    grouped = torch.nn.functional.grouped_mm

    def leaving_nan(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        product = grouped(a, b, offs=offs)
        product[int(offs[-1]) :] = float("nan")
        return product

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", leaving_nan)
    expected, actual = (
        ops.experts(x, routing, *pack(ops, gate_ups[held], downs[held]), held.start)
        for ops in (ORACLE, GROUPED)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_model_with_grouped_experts_is_captured_and_gives_the_same_tokens() -> None:
    """The work is repeated by computing it again: it must hold nothing of the step that was captured."""
    num_captured = 0

    def capture(work: Callable[[], torch.Tensor]) -> Recording:
        nonlocal num_captured
        num_captured += 1
        output = work()
        return Recording(output, lambda: output.copy_(work()))

    changes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    results = []
    for ops in (ORACLE, GROUPED, APART):
        twins = make_twins("qwen3_moe", ops=ops, **changes)
        cache = twins.new_runner()._kv_cache
        runner = ModelRunner(
            twins.model, cache, (), capture=None if ops is ORACLE else capture, max_sequences=2
        )
        assert isinstance(runner._decoding, CapturedDecoding) == (ops is GROUPED)
        dealer = BlockDealer()
        sequences = [dealer.sequence(make_prompt(length), 4) for length in (3, 20)]
        results.append([[t.token_id for t in row] for row in generate(runner, sequences)])
    assert results[0] == results[1] == results[2]
    assert num_captured
