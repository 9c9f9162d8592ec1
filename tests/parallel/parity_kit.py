"""What is generated to compare several ranks with one, and by which ops."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_ops import COMPILED_OPS
from rank_groups import lead_ranks
from tiny_models import BlockDealer, generate, make_prompt
from tiny_shards import load_rank

from engine.ops.cpu import CpuOps
from engine.weights import ModelFolder
from protocol.generation import Token
from protocol.rank_layout import RankLayout

FEW_LAYERS = {"num_hidden_layers": 2}
LENGTHS = (1, 37, 18)
"""Of the prompts."""


def generate_some(executor: Any, temperature: float = 0.9) -> list[list[Token]]:
    """Two greedy sequences, and a last one at that temperature; in chunks."""
    dealer = BlockDealer()
    sequences = [
        dealer.sequence(make_prompt(length), 5, logprobs=2, temperature=own, seed=length)
        for length, own in zip(LENGTHS, (0.0, 0.0, temperature), strict=True)
    ]
    return generate(executor, sequences, chunk_size=16)


def token_ids(outputs: list[list[Token]]) -> list[list[int]]:
    return [[token.token_id for token in tokens] for tokens in outputs]


def assert_alike(together: list[list[Token]], alone: list[list[Token]]) -> None:
    """The same tokens, about as likely: sums of several ranks are rounded elsewhere."""
    assert token_ids(together) == token_ids(alone)
    for mine, theirs in zip(chain(*together), chain(*alone), strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=2e-4)


def require_parity(folder: ModelFolder, layout: RankLayout, cache_dir: Path) -> None:
    alone = generate_some(load_rank(folder, None, cache_dir).runner)
    assert_alike(lead_ranks(folder, layout, cache_dir, generate_some), alone)


def cpp_ops(dtype: torch.dtype = torch.float32) -> CpuOps:
    """For one rank. Ask for `best_ops` first, which skips a test where there are none."""
    return CpuOps.create(COMPILED_OPS, dtype=dtype, head_dim=16, num_threads=1)
