"""Choosing tokens from logits, reproducibly: noise is a function of (seed, position)."""

from engine.sampling.draw import Draw, draw_with_torch
from engine.sampling.noise import uniforms
from engine.sampling.prompt_scores import MAX_ROWS, are_usable, score_prompts, scored_rows
from engine.sampling.sampler import Sampler

__all__ = [
    "MAX_ROWS",
    "Draw",
    "Sampler",
    "are_usable",
    "draw_with_torch",
    "score_prompts",
    "scored_rows",
    "uniforms",
]
