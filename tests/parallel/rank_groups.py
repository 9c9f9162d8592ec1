"""A whole group of ranks as threads: the leader's runner for a test, the others at its beck and call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rank_threads import run_groups
from tiny_shards import load_rank

from engine.parallel import RankGroups
from engine.parallel.channel import StepChannel
from engine.parallel.follower import Follower
from engine.parallel.leader import LeaderRunner
from engine.weights import ModelFolder
from protocol.rank_layout import RankLayout

T = TypeVar("T")


def lead_ranks(
    folder: ModelFolder, layout: RankLayout, cache_dir: Path, use: Callable[[LeaderRunner], T], **parts: Any
) -> T:
    """What `use` makes of the leader; the others are stopped then, and must end well.

    `parts` as for `load_rank`.
    """

    def rank(groups: RankGroups) -> T | None:
        mine = load_rank(folder, groups, cache_dir, **parts)
        channel = StepChannel(groups.steps, groups.for_tensors)
        if groups.rank > 0:
            Follower(mine.forward, channel).run()
            return None
        leader = LeaderRunner(mine.runner, channel, mine.kv_cache.block_size)
        result = use(leader)
        leader.stop()
        return result

    found = run_groups(layout, rank)[0]
    assert found is not None
    return found
