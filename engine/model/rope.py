"""Tables of the rotary position encoding: cos and sin for every position a model may see.

Computed once, in float32 and in the order of operations that transformers uses, then looked up: the
bits of a position never depend on what it is computed together with.
"""

from __future__ import annotations

import math

import torch

from engine.model.config import RopeConfig


def rope_tables(
    rope: RopeConfig, head_dim: int, num_positions: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), both [num_positions, head_dim]; the first half of `sin` is negated for `Ops.rope`."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * _inverse_frequencies(rope, head_dim, num_positions)
    scale = _attention_scale(rope)
    cos = angles.cos() * scale
    sin = angles.sin() * scale
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def _inverse_frequencies(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """[head_dim / 2], or [num_positions, head_dim / 2] where they depend on the position."""
    plain = 1.0 / _wavelengths(rope.theta, head_dim)
    match rope.rope_type:
        case "linear":
            return plain / rope.factor
        case "dynamic":
            return _dynamic(rope, head_dim, num_positions)
        case "yarn":
            return _yarn(rope, head_dim)
        case "llama3":
            return _llama3(rope, plain)
        case _:
            return plain


def _wavelengths(theta: float, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    result: torch.Tensor = theta**exponents
    return result


def _dynamic(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """NTK scaling by the length so far: the token at position p is rotated as in a sequence of p + 1.

    Transformers rotates a whole prompt by the prompt's length, and each generated token by the length
    then. The two agree for prompts of up to `original_max_positions` tokens. Beyond, a prompt token's
    key would depend on later tokens, which rules out chunks and shared prefixes.
    """
    lengths = torch.arange(1, num_positions + 1).clamp_(min=rope.original_max_positions)
    stretch = rope.factor * lengths / rope.original_max_positions - (rope.factor - 1)
    bases = rope.theta * stretch ** (head_dim / (head_dim - 2))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    return 1.0 / bases[:, None] ** exponents


def _yarn(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """YaRN, https://arxiv.org/abs/2309.00071: interpolate the slow dimensions, keep the fast ones."""
    wavelengths = _wavelengths(rope.theta, head_dim)
    low, high = _correction_range(rope, head_dim)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _correction_range(rope: RopeConfig, head_dim: int) -> tuple[float, float]:
    def dimension(num_rotations: float) -> float:
        ratio = rope.original_max_positions / (num_rotations * 2 * math.pi)
        return (head_dim * math.log(ratio)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high if high != low else high + 0.001


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: divide the slow frequencies, keep the fast ones, blend between."""
    slow_wavelength = rope.original_max_positions / rope.low_freq_factor
    fast_wavelength = rope.original_max_positions / rope.high_freq_factor
    wavelengths = 2 * math.pi / plain
    divided = torch.where(wavelengths > slow_wavelength, plain / rope.factor, plain)
    blend = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * divided / rope.factor + blend * divided
    is_between = ~(wavelengths < fast_wavelength) * ~(wavelengths > slow_wavelength)
    return torch.where(is_between, blended, divided)


def _attention_scale(rope: RopeConfig) -> float:
    """YaRN sharpens attention by scaling cos and sin."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
