"""How does a worker come to its followers? Its leader hosts the store, has them started, and ends them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cluster.config import ClusterConfig
from cluster.ranks.launch import RankHandle, RankLauncher
from cluster.ranks.meeting import Meeting
from cluster.ranks.spec import RankSpec
from cluster.ranks.team import LedTeam
from engine.parallel import host_store
from protocol.errors import StartupError
from protocol.ids import Role, WorkerIdentity

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class Followers:
    """The other ranks of one worker, which were started from this process."""

    def __init__(self, handles: Sequence[RankHandle], store: Store) -> None:
        """The store, in which they meet, is kept for as long."""
        self._handles = list(handles)
        self._store: Store | None = store

    def check(self) -> None:
        """While they start. Raises `StartupError` when one has ended without a word."""
        for rank, handle in enumerate(self._handles, start=1):
            if not handle.alive:
                raise StartupError(
                    f"rank {rank} of {1 + len(self._handles)} ended while it started: see its log"
                )

    def end(self, grace_s: float) -> None:
        """Wait until all have ended, for up to `grace_s`; then end them. Idempotent."""
        until_s = time.monotonic() + grace_s
        for handle in self._handles:
            handle.end(max(0.0, until_s - time.monotonic()))
        self._store = None


@contextmanager
def leading(
    config: ClusterConfig, role: Role, identity: WorkerIdentity, token: str, launcher: RankLauncher
) -> Iterator[LedTeam]:
    """Starts the followers, and gives the leader their team. When what is made with it fails, they end.

    Raises `StartupError`.
    """
    team = _start_followers(config, role, identity, token, launcher)
    try:
        yield team
    except BaseException as error:
        team.give_up(error)
        raise


def _start_followers(
    config: ClusterConfig, role: Role, identity: WorkerIdentity, token: str, launcher: RankLauncher
) -> LedTeam:
    layout, limits = config.layout_of(config.pool(role)), config.ranks
    store, address = host_store(launcher.host, limit_s=limits.start_timeout_s)
    handles = [
        launcher.launch(
            RankSpec(
                role=role,
                rank=rank,
                config=config.model_dump_json(),
                token=token,
                identity=identity,
                store_address=address,
                host=launcher.host,
            )
        )
        for rank in range(1, layout.num_ranks)
    ]
    followers = Followers(handles, store)
    meeting = Meeting(
        address, 0, layout.num_ranks, limits.start_timeout_s, token=token, watch=followers.check
    )
    return LedTeam(meeting, layout, launcher.host, limits, followers)
