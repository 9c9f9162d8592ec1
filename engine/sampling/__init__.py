"""Choosing tokens from logits, reproducibly: noise is a function of (seed, position)."""

from engine.sampling.noise import uniforms
from engine.sampling.sampler import Sampler

__all__ = ["Sampler", "uniforms"]
