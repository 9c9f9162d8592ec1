"""Ranks as threads of one process: each has a communicator of its own, and nothing else is shared."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch.distributed import HashStore

from engine.parallel import Communicator, RankGroups, connect, connect_groups
from engine.parallel.channel import StepChannel
from protocol.rank_layout import RankLayout

T = TypeVar("T")
LIMIT_S = 60.0
"""The machine may be busy; a test that passes waits for nothing."""


def run_ranks(
    num_ranks: int, work: Callable[[Communicator], T], limit_s: float = LIMIT_S, kind: str = "tcp"
) -> list[T]:
    """What `work` returns for each rank. Raises what the first rank that fails raised."""
    store = HashStore()

    def rank(number: int) -> T:
        communicator = connect(kind, store, number, num_ranks, device=torch.device("cpu"), limit_s=limit_s)
        try:
            return work(communicator)
        finally:
            communicator.close()

    return _in_threads(num_ranks, rank)


def run_groups(layout: RankLayout, work: Callable[[RankGroups], T], limit_s: float = LIMIT_S) -> list[T]:
    """As `run_ranks`, with all the groups that the ranks of a worker have."""
    store = HashStore()

    def rank(number: int) -> T:
        groups = connect_groups("tcp", store, number, layout, device=torch.device("cpu"), limit_s=limit_s)
        try:
            return work(groups)
        finally:
            StepChannel(groups.steps, groups.for_tensors).close()

    return _in_threads(layout.num_ranks, rank)


def _in_threads(num_ranks: int, rank: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(rank, range(num_ranks)))
