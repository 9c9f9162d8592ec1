"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from served_cluster import Served


WHOLE_CLUSTERS = {"acceptance", "cluster_hosts", "netns", "soak"}
"""Folders of tests that start clusters of processes, or measure what becomes of one under load."""


@pytest.hookimpl(tryfirst=True)  # xdist looks at the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of two processes one runs all clusters, from the start and one at a time: that takes longest.

    In a single process clusters come last. Those that share one on Ray run together in either case.
    """
    for item in items:
        item.add_marker(pytest.mark.xdist_group("clusters" if _needs_cluster(item) else item.path.stem))
    is_one_of_two = hasattr(config, "workerinput")
    items.sort(key=lambda item: (_needs_cluster(item) != is_one_of_two, *_order_of_clusters(item)))


def _needs_cluster(item: pytest.Item) -> bool:
    return item.path.parent.name in WHOLE_CLUSTERS or "ray" in item.keywords


def _order_of_clusters(item: pytest.Item) -> tuple[bool, bool]:
    return "ray" in item.keywords, "served" in getattr(item, "fixturenames", ())


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
