"""Which groups does a rank belong to? One for steps, one for its stage, and links from stage to stage.

    steps    all ranks              what to do, and that it is done; in host memory
    stage    those of one stage     sums, and parts of logits
    links    one rank and another   hidden states from a stage to the next one, each place to its like;
                                    logits from the last stage to the leader

A link is a group of two, whose first rank sends: a broadcast. Gloo's own sending and receiving cannot be
aborted: who waits in it stays for the whole limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.parallel.communicator import Communicator
from engine.parallel.connect import connect
from protocol.rank_layout import RankLayout

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

CPU = torch.device("cpu")
SENDER, RECEIVER = 0, 1
"""The ranks of a link."""


@dataclass(frozen=True, slots=True)
class RankGroups:
    """One rank's places. Used by one thread, but for what `Communicator` allows others."""

    rank: int
    layout: RankLayout
    steps: Communicator
    stage: Communicator
    before: Communicator | None
    """Brings what the stage before hands on; None on the first one."""
    after: Communicator | None
    """Takes what this stage hands on; None on the last one."""
    result: Communicator | None
    """Takes logits from the last stage's first rank to the leader; None on others, and with one stage."""

    @property
    def for_tensors(self) -> tuple[Communicator, ...]:
        """All but `steps`."""
        links = (self.before, self.after, self.result)
        return (self.stage, *(link for link in links if link is not None))


def connect_groups(
    kind: str,
    store: Store,
    rank: int,
    layout: RankLayout,
    *,
    device: torch.device,
    host: str = "127.0.0.1",
    limit_s: float = 60.0,
    key: bytes = b"",
) -> RankGroups:
    """This rank's places in all of its groups; `store` is for nothing else, or has a prefix of its own.

    `kind` and `key` are those of `connect`, for tensors on `device`; steps always go by TCP. Waits for the
    others, `limit_s` at most per group. Raises as `connect` does.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    def join(name: str, kind: str, place: int, size: int, device: torch.device = device) -> Communicator:
        own = PrefixStore(name, store)
        communicator = connect(kind, own, place, size, device=device, host=host, limit_s=limit_s, key=key)
        joined.callback(communicator.close)
        return communicator

    # All ranks join in the same order, so that no two wait for each other.
    stage, place = layout.stage_of(rank), layout.place_of(rank)
    with ExitStack() as joined:
        steps = join("steps", "tcp" if layout.num_ranks > 1 else "solo", rank, layout.num_ranks, CPU)
        mine = join(f"stage {stage}", kind, place, layout.tensor_parallel_size)
        links = {name: join(name, kind, role, 2) for name, role in _links(rank, layout)}
        joined.pop_all()  # nothing failed: they stay
    return RankGroups(
        rank=rank,
        layout=layout,
        steps=steps,
        stage=mine,
        before=links.get(_link_name(stage - 1, place)),
        after=links.get(_link_name(stage, place)),
        result=links.get(_RESULT),
    )


_RESULT = "result"


def _link_name(stage: int, place: int) -> str:
    return f"from stage {stage} at place {place}"


def _links(rank: int, layout: RankLayout) -> Iterator[tuple[str, int]]:
    """The names of the rank's links with its part in each, in the order of stages."""
    stage, place = layout.stage_of(rank), layout.place_of(rank)
    last_stage = layout.pipeline_parallel_size - 1
    if stage > 0:
        yield _link_name(stage - 1, place), RECEIVER
    if stage < last_stage:
        yield _link_name(stage, place), SENDER
    if last_stage > 0 and place == 0 and stage in (0, last_stage):
        yield _RESULT, RECEIVER if stage == 0 else SENDER
