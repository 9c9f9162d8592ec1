"""Transports must know whether a pool lies in host memory or on a GPU, and on which one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.rank_parts import RankParts
from kv_transfer import MemoryKind


@pytest.mark.parametrize(
    ("device", "kind", "device_id"),
    [("cpu", MemoryKind.HOST, 0), ("cuda", MemoryKind.DEVICE, 0), ("cuda:3", MemoryKind.DEVICE, 3)],
)
def test_a_pool_tells_where_it_lies(device: str, kind: MemoryKind, device_id: int) -> None:
    blocks = SimpleNamespace(device=torch.device(device))
    cache: Any = SimpleNamespace(blocks=blocks, data_ptr=4096, num_blocks=3, block_bytes=64)
    nothing: Any = None
    memory = RankParts(nothing, cache, None, nothing).pool_memory
    assert (memory.kind, memory.device_id, memory.num_bytes) == (kind, device_id, 192)
