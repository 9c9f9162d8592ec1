"""What does a follower do, from its start to its end? Loads its part, tells the leader, follows.

join the store ──> load one's part ──> agree on blocks ──> join the groups ──> open the KV side ──> follow
any failure on this way: all others hear why, and the worker's start ends; later: the leader's engine ends
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from cluster.compose import open_model
from cluster.rank_parts import load_rank
from cluster.ranks.kv_side import kv_side
from cluster.ranks.meeting import Meeting
from cluster.ranks.spec import RankSpec
from cluster.ranks.team import KV_SIDE, RankTeam
from engine.forward import ForwardPass
from engine.parallel.channel import StepChannel
from engine.parallel.follower import Follower
from kv_transfer import LoopbackNetwork
from protocol.errors import SplitserveError

logger = logging.getLogger(__name__)


def follow(spec: RankSpec, network: LoopbackNetwork | None = None) -> None:
    """Until the leader stops this rank. `network` as for `create_transport`.

    Raises `StartupError` when the worker cannot start, `EngineFault` when its leader or a rank is gone.
    """
    with _following(spec, network) as follower:
        follower.run()


@contextmanager
def _following(spec: RankSpec, network: LoopbackNetwork | None) -> Iterator[Follower]:
    config = spec.cluster_config()
    pool = config.pool(spec.role)
    layout = config.layout_of(pool)
    meeting = Meeting(
        spec.store_address, spec.rank, layout.num_ranks, config.ranks.start_timeout_s, token=spec.token
    )
    team = RankTeam(meeting, layout, spec.host, config.ranks)
    with ExitStack() as ends:
        try:
            parts = load_rank(config, pool, open_model(config), team)
            channel = team.step_channel()
            told = ends.enter_context(kv_side(spec, parts, network, lambda error: _leave(channel, error)))
            meeting.say(KV_SIDE, told)
        except BaseException as error:
            team.give_up(error)
            raise
        yield Follower(ForwardPass(parts.model, parts.kv_cache, parts.host_pool), channel)


def _leave(channel: StepChannel, error: SplitserveError) -> None:
    """So that the worker is replaced."""
    logger.error("this rank reads no KV any more: %s", error.message)
    channel.abort()
