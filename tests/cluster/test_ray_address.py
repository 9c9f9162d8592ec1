"""What names no Ray cluster is refused before Ray is asked."""

from __future__ import annotations

import pytest

from cluster.config import load_config
from protocol.errors import StartupError


@pytest.mark.parametrize(
    "address", ["auto", "10.0.0.1:6379", "head.lab:6379", "[::1]:6379", "ray://h:10001"]
)
def test_addresses_of_ray_clusters(address: str) -> None:
    assert load_config(None, {"ray.address": address}).ray.address == address


@pytest.mark.parametrize("address", ["nonsense", "10.0.0.1", "http://10.0.0.1", "10.0.0.1:port", "a b:1"])
def test_what_is_none(address: str) -> None:
    with pytest.raises(StartupError, match=r"ray\.address: must be auto or host:port"):
        load_config(None, {"ray.address": address})
