"""A whole group of ranks as threads: the leader's runner for a test, the others at its beck and call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rank_threads import run_ranks
from tiny_shards import load_rank

from engine.parallel import Communicator
from engine.parallel.channel import StepChannel
from engine.parallel.follower import Follower
from engine.parallel.leader import LeaderRunner
from engine.weights import ModelFolder

T = TypeVar("T")


def lead_ranks(
    folder: ModelFolder, num_ranks: int, cache_dir: Path, use: Callable[[LeaderRunner], T], **parts: Any
) -> T:
    """What `use` makes of the leader; the others are stopped then, and must end well.

    `parts` as for `load_rank`.
    """

    def rank(communicator: Communicator) -> T | None:
        mine = load_rank(folder, communicator, cache_dir, **parts)
        channel = StepChannel(communicator)
        if communicator.rank > 0:
            Follower(mine.forward, channel).run()
            return None
        leader = LeaderRunner(mine.runner, channel, mine.kv_cache.block_size)
        result = use(leader)
        leader.stop()
        return result

    found = run_ranks(num_ranks, rank)[0]
    assert found is not None
    return found
