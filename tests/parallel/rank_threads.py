"""Ranks as threads of one process: each has a communicator of its own, and nothing else is shared."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch.distributed import HashStore

from engine.parallel import Communicator, connect

T = TypeVar("T")
LIMIT_S = 60.0
"""The machine may be busy; a test that passes waits for nothing."""


def run_ranks(num_ranks: int, work: Callable[[Communicator], T], limit_s: float = LIMIT_S) -> list[T]:
    """What `work` returns for each rank. Raises what the first rank that fails raised."""
    store = HashStore()

    def rank(number: int) -> T:
        communicator = connect(
            "gloo", store, number, num_ranks, device=torch.device("cpu"), limit_s=limit_s
        )
        try:
            return work(communicator)
        finally:
            communicator.close()

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(rank, range(num_ranks)))
