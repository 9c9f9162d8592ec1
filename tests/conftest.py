"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from served_cluster import Served


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts a Ray cluster runs last, and those that share one run together."""
    items.sort(key=lambda item: ("ray" in item.keywords, "served" in getattr(item, "fixturenames", ())))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of the Llama family, as a Hugging Face folder."""
    from tiny_clusters import tiny_model

    return tiny_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def served(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One real cluster on Ray, shared by all tests that only use it or that heal it again."""
    from served_cluster import serving

    with serving(tiny_llama, tmp_path_factory.mktemp("served")) as running:
        yield running
