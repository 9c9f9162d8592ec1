"""Ranks as processes, which can be killed: the followers of a leader that lives in the test."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from tiny_shards import load_rank

from engine.parallel import connect_groups, host_store, join_store
from engine.parallel.channel import StepChannel
from engine.parallel.follower import Follower
from engine.parallel.leader import LeaderRunner
from engine.weights import ModelFolder
from protocol.rank_layout import RankLayout

CPU = torch.device("cpu")
LIMIT_S = 60.0
"""The machine may be busy; a test that passes waits for nothing."""


def follow(folder: ModelFolder, cache_dir: Path, address: str, rank: int, layout: RankLayout) -> None:
    """The main function of a follower's process."""
    torch.set_num_threads(1)
    store = join_store(address, limit_s=LIMIT_S)
    groups = connect_groups("tcp", store, rank, layout, device=CPU, limit_s=LIMIT_S)
    channel = StepChannel(groups.steps, groups.for_tensors)
    Follower(load_rank(folder, groups, cache_dir).forward, channel).run()


@contextmanager
def leading(
    folder: ModelFolder, layout: RankLayout, cache_dir: Path
) -> Iterator[tuple[LeaderRunner, list[BaseProcess]]]:
    """The leader, and the processes of the others, from rank 1 on; none is left behind."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rank_processes"])  # one import of torch for all of them
    store, address = host_store("127.0.0.1", limit_s=LIMIT_S)
    others = [
        context.Process(target=follow, args=(folder, cache_dir, address, rank, layout))
        for rank in range(1, layout.num_ranks)
    ]
    for process in others:
        process.start()
    channel = None
    try:
        groups = connect_groups("tcp", store, 0, layout, device=CPU, limit_s=LIMIT_S)
        channel = StepChannel(groups.steps, groups.for_tensors)
        mine = load_rank(folder, groups, cache_dir)
        yield LeaderRunner(mine.runner, channel, mine.kv_cache.block_size), others
    finally:
        if channel is not None:
            channel.close()
        for process in others:
            process.join(LIMIT_S)
            process.kill()
            process.join(LIMIT_S)
