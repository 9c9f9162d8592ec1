"""Would the state machine and the random load find a broken engine? Each bug here must be found by both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import pytest
from engine_load import RandomLoad
from engine_machine import AnyOrder, machine_settings
from engine_world import World
from hypothesis.stateful import run_state_machine_as_test

from engine.block_moves import BlockMoves
from engine.block_pool import BlockPool
from engine.config import SchedulerConfig
from engine.prefix_cache import PrefixCache
from engine.prefix_hash import BlockKey
from engine.roster import Roster
from engine.sequence import Sequence, SequenceState
from engine.swapping import Swapper
from protocol.errors import EngineFault
from protocol.ids import BlockId, HostBlockId

MakeRoster = Callable[[SchedulerConfig], Roster]


class SharesWithoutReference(BlockPool):
    """Cached blocks that somebody uses are given to a second one without being counted."""

    def share(self, block_ids: Iterable[BlockId]) -> None:
        super().share([block_id for block_id in block_ids if self.ref_count(block_id) == 0])


class NeverCopies(BlockPool):
    """Two choices write into the block that they share."""

    def is_shared(self, block_id: BlockId, num_leaving: int = 0) -> bool:
        return False


class ForgetsNothing(BlockPool):
    """Invalidated blocks can still be hit."""

    def forget(self, is_meant: Callable[[BlockKey], bool]) -> list[BlockId]:
        return []


class LosesBlocks(BlockPool):
    """The last block of a long table is never given back."""

    def free(self, block_ids: Items[BlockId]) -> None:
        super().free(block_ids[:4])


class ForgetsLast(list[tuple[HostBlockId, BlockId]]):
    def __iadd__(self, pairs: Iterable[tuple[HostBlockId, BlockId]]) -> ForgetsLast:  # type: ignore[misc, override]
        self.extend([*pairs][:-1])
        return self


@dataclass(slots=True)
class LosesSwapIns(BlockMoves):
    """The last block of a swapped sequence stays on the host."""

    swaps_in: list[tuple[HostBlockId, BlockId]] = field(default_factory=ForgetsLast)


class GoesOnRegistering(PrefixCache):
    """Those that run while the cache is invalidated put what they compute into it under the old names."""

    def invalidate(
        self, token_ids: Items[int] | None, cache_salt: str | None, live: Iterable[Sequence]
    ) -> int:
        sequences = [*live]
        num_blocks = super().invalidate(token_ids, cache_salt, ())
        for sequence in sequences:
            sequence.is_stale = False
        return num_blocks


class GivesTheLastToken(PrefixCache):
    """A prompt that is wholly cached is not computed by those that sample from it."""

    def prefix_of(self, sequence: Sequence) -> list[BlockId]:
        state, sequence.state = sequence.state, SequenceState.RESERVING
        cached = super().prefix_of(sequence)
        sequence.state = state
        return cached


class TrustsEveryFetch(Roster):
    """What was fetched stays in the prefix cache when it is of no worth."""

    def recompute(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.FETCHING:
            sequence.num_computed = len(sequence.token_ids)
            self.cache.register(sequence)
        super().recompute(sequence)


class TakesNoSeatForTheUnborn(Roster):
    """Choices of a reserved sequence are not counted while it is fetched."""

    @property
    def num_seats_taken(self) -> int:
        return self.num_running + self.num_fetching


class KeepsHostBlocks(Swapper):
    """Host blocks are not given back."""

    def drop(self, sequence: Sequence) -> None:
        sequence.host_table = []


def with_pool(make_pool: Callable[[int], BlockPool]) -> MakeRoster:
    return lambda config: Roster(config, pool=make_pool(config.num_blocks))


def losing_swap_ins(config: SchedulerConfig) -> Roster:
    return Roster(config, moves=LosesSwapIns())


def going_on_registering(config: SchedulerConfig) -> Roster:
    roster = Roster(config)
    roster.cache = GoesOnRegistering(config, roster.pool, roster.tables)
    return roster


def giving_the_last_token(config: SchedulerConfig) -> Roster:
    roster = Roster(config)
    roster.cache = GivesTheLastToken(config, roster.pool, roster.tables)
    return roster


def keeping_host_blocks(config: SchedulerConfig) -> Roster:
    roster = Roster(config)
    roster.swapper = KeepsHostBlocks(config, roster.tables, roster.moves, roster.counters)
    return roster


BUGS = {
    "a share without a reference": with_pool(SharesWithoutReference),
    "no copy on write": with_pool(NeverCopies),
    "a stale cache entry after an invalidation": with_pool(ForgetsNothing),
    "blocks that are not given back": with_pool(LosesBlocks),
    "a lost swap-in": losing_swap_ins,
    "stale KV that enters the cache": going_on_registering,
    "a cached last token for those that compute it": giving_the_last_token,
    "a failed fetch that enters the cache": TrustsEveryFetch,
    "choices without a seat": TakesNoSeatForTheUnborn,
    "host blocks that are not given back": keeping_host_blocks,
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_random_load_finds(bug: str) -> None:
    world = World(make_roster=BUGS[bug], preemption="swap", policy="fcfs")
    with pytest.raises((EngineFault, AssertionError)):
        RandomLoad(world, seed=3).run(3000)


@pytest.mark.parametrize("bug", BUGS)
def test_the_state_machine_finds(bug: str) -> None:
    class Broken(AnyOrder):
        def make_world(self, **engine_settings: object) -> World:
            return World(make_roster=BUGS[bug], **engine_settings)

    with pytest.raises((EngineFault, AssertionError)):
        run_state_machine_as_test(Broken, settings=machine_settings(400, shrink=False))


def test_without_a_bug_nothing_is_found() -> None:
    RandomLoad(World(preemption="swap", policy="fcfs"), seed=3).run(300)
