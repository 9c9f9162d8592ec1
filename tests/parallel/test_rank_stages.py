"""Stages of a few layers each give the tokens of one rank, alone and with ranks that share layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_rank_parity import FEW_LAYERS, require_parity
from tiny_shards import write_model

from protocol.rank_layout import RankLayout

TWO_STAGES, TWO_BY_TWO = RankLayout(1, 2), RankLayout(2, 2)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("layout", [TWO_STAGES, TWO_BY_TWO], ids=["two_stages", "two_by_two"])
@pytest.mark.parametrize("kind", ["llama_biased", "qwen2", "qwen3_tied", "one_kv_head"])
def test_stages_give_the_tokens_of_one_rank(kind: str, layout: RankLayout, tmp_path: Path) -> None:
    require_parity(write_model(kind, tmp_path, **FEW_LAYERS), layout, tmp_path)


def test_layers_keep_their_windows_in_uneven_stages(tmp_path: Path) -> None:
    """Five layers in three stages; those from the second on see few positions, if the model says so."""
    folder = write_model("qwen2_sliding", tmp_path, num_hidden_layers=5, max_window_layers=3)
    require_parity(folder, RankLayout(1, 3), tmp_path)
