"""A whole model on the Triton ops says what it says on torch's, and they are what torch expects of ops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_samples import make_cache, make_layout
from tiny_models import BlockDealer, generate, make_prompt, make_twins
from torch.utils._python_dispatch import TorchDispatchMode

from engine.ops.triton import TritonOps, Tuning, gather_parts, scatter_parts
from engine.ops.triton.tuning import Tile

TUNING = Tuning(Tile(128, 4, 1), Tile(128, 4, 1, queries=64), num_multiprocessors=1)


@pytest.mark.parametrize(
    ("kind", "special"), [("llama_biased", {}), ("qwen3", {}), ("mistral_sliding", {"sliding_window": 7})]
)
def test_greedy_tokens_are_those_of_torch(kind: str, special: dict[str, int]) -> None:
    changes = {"num_hidden_layers": 1, "num_attention_heads": 4, **special}
    tokens = []
    for ops in (None, TritonOps(TUNING)):
        dealer = BlockDealer()
        sequences = [dealer.sequence(make_prompt(length), 3) for length in (3, 11)]
        generated = generate(make_twins(kind, ops=ops, **changes).new_runner(), sequences, chunk_size=8)
        tokens.append([[token.token_id for token in each] for each in generated])
    assert tokens[0] == tokens[1]


class Calls(TorchDispatchMode):
    """Collects the calls of the project's own ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple] = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "splitserve":
            self.calls[str(op)] = (
                op,
                tuple(each.clone() if isinstance(each, torch.Tensor) else each for each in args),
            )
        return op(*args, **(kwargs or {}))


def own_calls() -> Iterator[tuple]:
    ops, layout, cache = TritonOps(TUNING), make_layout([(20, 1), (2, 2)]), make_cache(1, 16, 8)
    x, weight = torch.randn(layout.num_rows, 32), torch.rand(32)
    heads, cos = torch.randn(layout.num_rows, 4, 16), torch.rand(layout.num_rows, 16)
    with Calls() as seen:
        attention = ops.attention(layout, cache)
        attention.write(1, heads[:, 2:3], heads[:, 3:])
        attention.attend(1, attention.rotate_and_write(1, heads, 2, cos, cos), None)
        ops.add_rms_norm(ops.rms_norm(x, weight, 1e-5), x, weight, 1e-5)
        ops.rms_norm_(heads, weight[:16], 1e-5)
        ops.rope(heads, cos, cos)
        ops.multiply_gate(x)
        ids = torch.tensor([1, 2], dtype=torch.int32)
        scatter_parts(gather_parts(cache, ids, 0, 1), cache, ids, 0)
    return iter(seen.calls.values())


def test_schemas_and_fakes_tell_the_truth() -> None:
    checked = []
    for op, args in own_calls():
        with torch.inference_mode(False):
            own = tuple(each.clone() if isinstance(each, torch.Tensor) else each for each in args)
            torch.library.opcheck(op, own, test_utils=("test_schema", "test_faketensor"))
        checked.append(op)
    assert len(checked) == 11
