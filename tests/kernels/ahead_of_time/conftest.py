"""Compiled kernels are kept between runs: what has not changed is not compiled again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from triton import knobs


@pytest.fixture(autouse=True, scope="session")
def kept_binaries(pytestconfig: pytest.Config) -> Iterator[None]:
    before = knobs.cache.dir
    knobs.cache.dir = str(pytestconfig.rootpath / ".pytest_cache" / "triton")
    yield
    knobs.cache.dir = before
