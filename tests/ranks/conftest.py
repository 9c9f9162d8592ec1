"""The model that these tests share, and with it what is compiled for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_clusters import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four query heads and two KV heads: on four ranks each KV head is on two of them."""
    return tiny_model("qwen2", tmp_path_factory.mktemp("models"), num_hidden_layers=4)
