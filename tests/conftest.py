"""Fixtures for all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from served_cluster import Served


_SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("the same examples", derandomize=True, **_SLOW)
settings.register_profile("explore", **_SLOW)  # pytest --hypothesis-profile explore
settings.load_profile("the same examples")

CLUSTERS_OF_PROCESSES = {"acceptance", "cluster_hosts", "netns", "soak"}
"""Folders of tests that start some, and see what becomes of them under load."""
IN_ONE_PROCESS = {
    f"test_cluster_{name}.py" for name in ("api", "drain", "hangups", "local", "parity", "unequal")
}
"""Files of these folders that do not."""


def pytest_configure() -> None:
    """Dozens of processes import the same modules: compile them once, whatever the environment says."""
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Clusters come last, and those that share one on Ray together. With two processes they come first."""
    first = hasattr(config, "workerinput")
    items.sort(key=lambda item: (_needs_cluster(item.nodeid) != first, *_order_of_clusters(item)))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of two processes one runs all clusters, one at a time, for that takes longest; the other all else."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "clusters" if _needs_cluster(nodeid) else nodeid.partition("::")[0]

    return Scheduling(config, log)


def _needs_cluster(nodeid: str) -> bool:
    file = PurePosixPath(nodeid.partition("::")[0])
    if file.name in IN_ONE_PROCESS:
        return False
    return file.parent.name in CLUSTERS_OF_PROCESSES or file.name.startswith("test_ray_")


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
