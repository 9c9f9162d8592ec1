"""The values of norms, gate and rotation, against torch."""

from __future__ import annotations

import pytest
import torch

from engine.ops import TorchOps
from engine.ops.triton import TritonOps, Tuning
from engine.ops.triton.tuning import Tile

OPS = TritonOps(Tuning(Tile(64, 4, 1), Tile(64, 4, 1), num_multiprocessors=2))
ORACLE = TorchOps(torch.device("cpu"), torch.float32)
RELATIVE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""One unit in the last place of the result; what is between is float32."""
every_dtype = pytest.mark.parametrize("dtype", RELATIVE, ids=str)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype is dtype
    torch.testing.assert_close(actual.float(), expected, rtol=RELATIVE[dtype], atol=1e-5)


@every_dtype
@pytest.mark.parametrize("width", [96, 576])
def test_norm(dtype: torch.dtype, width: int) -> None:
    x, weight = torch.randn(5, width).to(dtype), torch.rand(width).to(dtype)
    close(OPS.rms_norm(x, weight, 1e-5), ORACLE.rms_norm(x.float(), weight.float(), 1e-5), dtype)


@every_dtype
def test_norm_of_a_view_in_place_leaves_the_rest(dtype: torch.dtype) -> None:
    heads, weight = torch.randn(5, 7, 48).to(dtype), torch.rand(48).to(dtype)
    before = heads.clone()
    OPS.rms_norm_(heads[:, 2:5], weight, 1e-6)
    close(heads[:, 2:5], ORACLE.rms_norm(before[:, 2:5].float(), weight.float(), 1e-6), dtype)
    assert torch.equal(heads[:, :2], before[:, :2])
    assert torch.equal(heads[:, 5:], before[:, 5:])


@every_dtype
def test_norm_and_residual_are_one_step(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(2, 5, 96).to(dtype)[0], torch.randn(5, 96).to(dtype), torch.rand(96)
    total = x + residual
    expected = ORACLE.rms_norm(total.float(), weight, 1e-5)
    normalised, summed = OPS.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(summed, total)
    close(normalised, expected, dtype)


@every_dtype
@pytest.mark.parametrize("width", [44, 1500])
def test_gated_multiplies_the_second_half_by_the_silu_of_the_first(dtype: torch.dtype, width: int) -> None:
    gate_up = torch.randn(3, 2 * width).to(dtype) * 2
    gate, up = gate_up.float().chunk(2, -1)
    close(OPS.multiply_gate(gate_up), torch.nn.functional.silu(gate) * up, dtype)


def test_gated_with_its_weights() -> None:
    weight, x = torch.randn(2 * 44, 33) * 0.2, torch.randn(3, 33)
    for bias in (None, torch.randn(2 * 44)):
        expected = ORACLE.gated(x, ORACLE.pack_gate_up(weight, bias))
        torch.testing.assert_close(OPS.gated(x, OPS.pack_gate_up(weight, bias)), expected)


@every_dtype
@pytest.mark.parametrize(("num_heads", "head_dim"), [(3, 16), (12, 48), (40, 128)])
def test_rope_of_a_view_rotates_halves_against_each_other(
    dtype: torch.dtype, num_heads: int, head_dim: int
) -> None:
    heads = torch.randn(3, num_heads + 2, head_dim).to(dtype)
    cos, sin = torch.randn(2, 3, head_dim).to(dtype)
    before = heads.clone()
    rotated = OPS.rope(heads[:, :num_heads], cos, sin)
    expected = ORACLE.rope(before[:, :num_heads].float(), cos.float(), sin.float())
    torch.testing.assert_close(rotated.float(), expected, rtol=RELATIVE[dtype], atol=RELATIVE[dtype])
    assert torch.equal(heads[:, num_heads:], before[:, num_heads:])


def test_logits_are_float32_whatever_the_model_is() -> None:
    weight, x = torch.randn(50, 64).bfloat16(), torch.randn(4, 64).bfloat16()
    logits = OPS.logits(x, OPS.pack_head(weight))
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, x.float() @ weight.float().T, rtol=1e-4, atol=1e-4)
