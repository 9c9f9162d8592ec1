"""Ranks as processes, which can be killed: the followers of a leader that lives in the test."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from tiny_shards import load_rank

from engine.parallel import connect, host_store, join_store
from engine.parallel.channel import StepChannel
from engine.parallel.follower import Follower
from engine.parallel.leader import LeaderRunner
from engine.weights import ModelFolder

CPU = torch.device("cpu")
LIMIT_S = 60.0
"""The machine may be busy; a test that passes waits for nothing."""


def follow(folder: ModelFolder, cache_dir: Path, address: str, rank: int, num_ranks: int) -> None:
    """The main function of a follower's process."""
    torch.set_num_threads(1)
    store = join_store(address, limit_s=LIMIT_S)
    communicator = connect("gloo", store, rank, num_ranks, device=CPU, limit_s=LIMIT_S)
    Follower(load_rank(folder, communicator, cache_dir).forward, StepChannel(communicator)).run()


@contextmanager
def leading(
    folder: ModelFolder, num_ranks: int, cache_dir: Path
) -> Iterator[tuple[LeaderRunner, list[BaseProcess]]]:
    """The leader, and the processes of the others, from rank 1 on; none is left behind."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rank_processes"])  # one import of torch for all of them
    store, address = host_store("127.0.0.1", limit_s=LIMIT_S)
    others = [
        context.Process(target=follow, args=(folder, cache_dir, address, rank, num_ranks))
        for rank in range(1, num_ranks)
    ]
    for process in others:
        process.start()
    communicator = None
    try:
        communicator = connect("gloo", store, 0, num_ranks, device=CPU, limit_s=LIMIT_S)
        mine = load_rank(folder, communicator, cache_dir)
        yield LeaderRunner(mine.runner, StepChannel(communicator), mine.kv_cache.block_size), others
    finally:
        if communicator is not None:
            communicator.close()
        for process in others:
            process.join(LIMIT_S)
            process.kill()
            process.join(LIMIT_S)
