"""Experts: who is chosen, what they give together, and that a row's bits are its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cpp_variants import VARIANTS, best_ops, variant_ops
from tiny_models import CPU, make_twins

from engine.model.decoding import RecordedDecoding
from engine.ops import LinearStack, Ops, Routing, TorchOps
from engine.runner import ModelRunner

IMPLEMENTATIONS: dict[str, Callable[[torch.dtype], Ops]] = {
    "torch": lambda dtype: TorchOps(CPU, dtype),
    **{f"cpp-{name}": partial(variant_ops, name) for name in VARIANTS},
}
HIDDEN, INNER, NUM_EXPERTS, NUM_CHOSEN = 96, 40, 6, 3


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return IMPLEMENTATIONS[request.param](torch.float32)


class Experts:
    """Random ones, and the obvious way to compute them."""

    def __init__(self, dtype: torch.dtype = torch.float32, hidden: int = HIDDEN) -> None:
        self.gate_ups = (torch.randn(NUM_EXPERTS, 2 * INNER, hidden) * 0.1).to(dtype)
        self.downs = (torch.randn(NUM_EXPERTS, hidden, INNER) * 0.1).to(dtype)

    def packed(self, ops: Ops, held: slice = slice(None)) -> tuple[LinearStack, LinearStack]:
        gate_ups, downs = self.gate_ups[held], self.downs[held]
        return ops.pack_gate_ups(iter(gate_ups), len(gate_ups)), ops.pack_downs(iter(downs), len(downs))

    def naive(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        total = torch.zeros(x.shape)
        for row in range(len(x)):
            for expert, weight in zip(routing.experts[row], routing.weights[row], strict=True):
                gate, up = F.linear(x[row].float(), self.gate_ups[expert].float()).chunk(2)
                total[row] += weight * F.linear(F.silu(gate) * up, self.downs[expert].float())
        return total


def random_routing(rows: int) -> Routing:
    return TorchOps(CPU, torch.float32).route(torch.randn(rows, NUM_EXPERTS), NUM_CHOSEN, normalizes=True)


def part(routing: Routing, rows: slice) -> Routing:
    return Routing(routing.experts[rows], routing.weights[rows])


# Routing


def test_the_likeliest_are_chosen_and_listed_in_their_order(ops: Ops) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, -1.0, 0.0, 4.0]])
    routing = ops.route(logits, 2, normalizes=False)
    assert routing.experts.tolist() == [[1, 3], [0, 3]]
    torch.testing.assert_close(routing.weights, logits.softmax(-1).gather(1, routing.experts))


def test_weights_add_up_to_one_only_where_they_are_normalised(ops: Ops) -> None:
    logits = torch.randn(50, 8)
    normalised, plain = (ops.route(logits, 3, normalizes=normalizes) for normalizes in (True, False))
    torch.testing.assert_close(normalised.weights.sum(-1), torch.ones(50))
    assert (plain.weights.sum(-1) < 1).all()
    torch.testing.assert_close(plain.weights / plain.weights.sum(-1, keepdim=True), normalised.weights)


def test_of_equally_likely_experts_the_first_are_chosen(ops: Ops) -> None:
    assert ops.route(torch.zeros(3, 100), 4, normalizes=True).experts.tolist() == [[0, 1, 2, 3]] * 3


def test_rows_that_are_no_numbers_choose_experts_that_exist(ops: Ops) -> None:
    routing = ops.route(torch.full((2, 5), float("nan")), 2, normalizes=True)
    assert routing.experts.tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize("num_experts", [4, 8, 60, 128])
@pytest.mark.parametrize("normalizes", [False, True])
def test_routing_of_a_row_does_not_depend_on_others(ops: Ops, num_experts: int, normalizes: bool) -> None:
    logits = torch.randn(37, num_experts) * 3
    whole = ops.route(logits, 4, normalizes=normalizes)
    for rows in (slice(0, 1), slice(3, 5), slice(7, 20), slice(36, 37)):
        alone = ops.route(logits[rows].clone(), 4, normalizes=normalizes)
        assert torch.equal(alone.experts, whole.experts[rows])
        assert torch.equal(alone.weights, whole.weights[rows])


# What experts give together


@pytest.mark.parametrize("rows", [2, 4, 30])
def test_experts_are_the_weighted_sum_of_their_mlps(ops: Ops, rows: int) -> None:
    experts, x = Experts(), torch.randn(rows, HIDDEN)
    routing = random_routing(rows)
    actual = ops.experts(x, routing, *experts.packed(ops))
    torch.testing.assert_close(actual, experts.naive(x, routing), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("hidden", [HIDDEN, 51])
def test_bfloat16_is_near(variant: str, hidden: int) -> None:
    ops, experts = variant_ops(variant, torch.bfloat16), Experts(torch.bfloat16, hidden)
    x, routing = torch.randn(10, hidden).to(torch.bfloat16), random_routing(10)
    actual = ops.experts(x, routing, *experts.packed(ops))
    assert actual.dtype is torch.bfloat16
    torch.testing.assert_close(actual.float(), experts.naive(x, routing), rtol=2e-2, atol=2e-2)


def test_the_shares_of_two_halves_of_the_experts_are_the_whole(ops: Ops) -> None:
    experts, x, routing = Experts(), torch.randn(20, HIDDEN), random_routing(20)
    whole = ops.experts(x, routing, *experts.packed(ops))
    total = torch.zeros_like(x)
    for held in (slice(0, 2), slice(2, 6)):
        total += ops.experts(x, routing, *experts.packed(ops, held), held.start)
    torch.testing.assert_close(total, whole)


def test_rows_of_experts_that_are_elsewhere_get_nothing(ops: Ops) -> None:
    x, routing = torch.randn(4, HIDDEN), random_routing(4)
    assert not ops.experts(x, routing, *Experts().packed(ops), NUM_EXPERTS).any()


def test_the_bits_of_a_row_do_not_depend_on_its_neighbours(ops: Ops) -> None:
    """Neighbours decide how many rows an expert multiplies at once."""
    experts, x, routing = Experts().packed(ops), torch.randn(64, HIDDEN), random_routing(64)
    whole = ops.experts(x, routing, *experts)
    for start, stop in ((0, 2), (2, 4), (10, 16), (16, 48), (0, 64)):
        rows = slice(start, stop)
        assert torch.equal(ops.experts(x[rows], part(routing, rows), *experts), whole[rows])
    order = torch.randperm(64)
    shuffled = Routing(routing.experts[order], routing.weights[order])
    assert torch.equal(ops.experts(x[order], shuffled, *experts), whole[order])


def test_threads_change_no_bit() -> None:
    experts, x, routing = Experts(), torch.randn(33, HIDDEN), random_routing(33)
    one, two = (best_ops(torch.float32, num_threads=count) for count in (1, 2))
    expected = one.experts(x, routing, *experts.packed(one))
    assert torch.equal(two.experts(x, routing, *experts.packed(two)), expected)


def test_a_row_that_is_no_number_spoils_no_other(ops: Ops) -> None:
    experts, x, routing = Experts().packed(ops), torch.randn(16, HIDDEN), random_routing(16)
    whole = ops.experts(x.clone(), routing, *experts)
    x[5] = float("nan")
    spoilt = ops.experts(x, routing, *experts)
    others = [row for row in range(16) if row != 5]
    assert torch.equal(spoilt[others], whole[others])
    assert spoilt[5].isnan().all()


# What cannot be recorded


def test_a_model_with_experts_is_not_captured_where_they_wait() -> None:
    def capture(_: Callable[[], torch.Tensor]) -> None:
        raise AssertionError("captured")

    twins = make_twins("mixtral")
    cache = twins.new_runner()._kv_cache
    assert twins.model.waits
    runner = ModelRunner(twins.model, cache, (), capture=capture)  # type: ignore[arg-type]
    runner.warm_up()
    assert not make_twins("llama").model.waits


def test_cpp_experts_are_recorded() -> None:
    twins = make_twins("mixtral", ops=best_ops(torch.float32))
    assert RecordedDecoding.create(twins.model, twins.new_runner()._kv_cache.blocks) is not None


def test_a_layer_without_experts_among_those_with_them_has_an_mlp() -> None:
    config = make_twins("qwen3_moe_mixed").config
    assert [experts is None for experts in config.experts] == [False, True, False]
    assert config.experts[0] is not None
    assert config.experts[0].intermediate_size != config.intermediate_size
