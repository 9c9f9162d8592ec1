"""What does a rank do together with the others of its worker, from the making of its engine on?

shard_of   its part of the model                 agree      on what all of them have room for
join       what ranks do together within a pass
lead       (leader) an executor for all ranks    attend     (leader) they end with the engine
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Protocol

from cluster.ranks.leading_engine import END_S, LeadingEngine
from cluster.ranks.meeting import Meeting
from cluster.ranks_config import RanksConfig
from engine import Command
from engine.parallel import RankGroups, RankPartition, Shard, connect_groups, shard_of
from engine.parallel.channel import StepChannel
from engine.parallel.leader import LeaderRunner
from protocol.rank_layout import RankLayout
from rpc import Engine

if TYPE_CHECKING:
    import torch

    from cluster.ranks.group import Followers
    from engine.model.config import ModelConfig
    from engine.model.partition import Partition
    from engine.runner import ModelRunner

KV_SIDE = "kv side"


@dataclass(frozen=True, slots=True)
class Room:
    """What a rank's memory holds."""

    num_blocks: int
    num_host_blocks: int


class Team(Protocol):
    """What the making of any rank's engine needs: the ranks of a worker, as one of them sees them."""

    @property
    def layout(self) -> RankLayout: ...

    def shard_of(self, model: ModelConfig) -> Shard | None:
        """None: all of it. Raises `StartupError` for a model that is too small."""

    def agree(self, room: Room) -> Room:
        """The least that any rank has: all use the same blocks. Raises `StartupError`."""

    def join(self, shard: Shard | None, device: torch.device) -> Partition | None:
        """Once all ranks are ready. None: nobody else is there. Raises `EngineFault`."""


class LeaderTeam(Team, Protocol):
    """What the making of a worker with scheduler and sampler needs beside."""

    @property
    def kv_sides(self) -> tuple[str, ...]:
        """What the followers say of theirs (see `kv_side`), in the order of ranks; known once it leads."""

    def lead(self, runner: ModelRunner, block_size: int) -> ModelRunner | LeaderRunner:
        """What executes steps on all ranks."""

    def keep_alive(self) -> None:
        """For the engine's thread, while there is nothing to execute. Raises `EngineFault`."""

    def attend(self, engine: Engine[Command]) -> Engine[Command]:
        """The engine, with which the other ranks end."""


class TeamOfOne:
    """Of a worker with one rank."""

    layout = RankLayout()
    kv_sides = ()

    def shard_of(self, model: ModelConfig) -> Shard | None:
        return None

    def agree(self, room: Room) -> Room:
        return room

    def join(self, shard: Shard | None, device: torch.device) -> Partition | None:
        return None

    def lead(self, runner: ModelRunner, block_size: int) -> ModelRunner | LeaderRunner:
        return runner

    def keep_alive(self) -> None:
        """Nobody waits."""

    def attend(self, engine: Engine[Command]) -> Engine[Command]:
        return engine


class RankTeam:
    """Of several ranks, as each of them sees it; what leader and followers do alike."""

    def __init__(self, meeting: Meeting, layout: RankLayout, host: str, ranks: RanksConfig) -> None:
        """`host` is this rank's address, as the others reach it."""
        self.layout = layout
        self._meeting = meeting
        self._host = host
        self._ranks = ranks
        self._groups: RankGroups | None = None

    def shard_of(self, model: ModelConfig) -> Shard | None:
        return shard_of(model, self._meeting.rank, self.layout, expert_parallel=self._ranks.expert_parallel)

    def agree(self, room: Room) -> Room:
        self._meeting.say("room", json.dumps(astuple(room)))
        rooms = [json.loads(text) for text in self._meeting.hear("room")]
        return Room(*map(min, zip(*rooms, strict=True)))

    def join(self, shard: Shard | None, device: torch.device) -> Partition | None:
        assert shard is not None, "this rank's part of the model"  # noqa: S101
        self._groups = connect_groups(
            self._communicator(device),
            self._meeting.group_store("groups"),
            self._meeting.rank,
            self.layout,
            device=device,
            host=self._host,
            limit_s=self._ranks.step_timeout_s,
            key=self._meeting.group_key("groups"),
        )
        return RankPartition(shard, self._groups)

    def _communicator(self, device: torch.device) -> str:
        if self._ranks.communicator != "auto":
            return self._ranks.communicator
        return "nccl" if device.type == "cuda" else "tcp"

    def step_channel(self) -> StepChannel:
        """Between the leader and the others, once this rank has joined them."""
        assert self._groups is not None, "the ranks have met"  # noqa: S101
        return StepChannel(self._groups.steps, self._groups.for_tensors)

    def give_up(self, error: BaseException) -> None:
        """This rank cannot start, and so the worker cannot: all others hear why. Raises `EngineFault`."""
        if self._groups is not None:
            self.step_channel().close()
        self._meeting.fail(error)


class LedTeam(RankTeam):
    """As the leader sees it. Owns the followers that it has started."""

    def __init__(
        self, meeting: Meeting, layout: RankLayout, host: str, ranks: RanksConfig, followers: Followers
    ) -> None:
        super().__init__(meeting, layout, host, ranks)
        self._followers = followers
        self._leader: LeaderRunner | None = None
        self.kv_sides: tuple[str, ...] = ()

    def lead(self, runner: ModelRunner, block_size: int) -> ModelRunner | LeaderRunner:
        channel = self.step_channel()
        self._meeting.say(KV_SIDE)
        _, *others = self._meeting.hear(KV_SIDE)
        self.kv_sides = tuple(others)
        self._leader = LeaderRunner(runner, channel, block_size)
        return self._leader

    def keep_alive(self) -> None:
        if self._leader is not None:
            self._leader.keep_alive()

    def attend(self, engine: Engine[Command]) -> Engine[Command]:
        assert self._leader is not None, "it leads before its engine runs"  # noqa: S101
        return LeadingEngine(engine, self._leader, self._followers)

    def give_up(self, error: BaseException) -> None:
        """As every rank does; no follower is left."""
        try:
            super().give_up(error)
        finally:
            self._followers.end(END_S)
