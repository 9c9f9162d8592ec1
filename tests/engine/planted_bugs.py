"""Engines that are broken in one way each, and a load under which it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from engine.admission import Admission
from engine.block_moves import BlockMoves
from engine.block_pool import BlockPool
from engine.cached_prefix import CachedPrefix
from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.messages import AddSequence, BlocksAllocated, Event, ReserveSequence
from engine.plan import Executor, StepPlan
from engine.prefix_cache import PrefixCache
from engine.prefix_hash import BlockKey
from engine.room import Room
from engine.roster import Roster
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceState
from engine.swapping import Swapper
from protocol.ids import BlockId, HostBlockId, SequenceId
from protocol.ports import Clock

MakeRoster = Callable[[SchedulerConfig], Roster]
MakeCore = Callable[..., EngineCore]
Settings = dict[str, object]


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


class RemembersWhatIsGone(BlockPool):
    """What the cache could give to the first one waiting it gives later, too."""

    def uncache(self, block_id: BlockId) -> list[BlockId]:
        watched, self._watched = self._watched, CachedPrefix(())
        dropped = super().uncache(block_id)
        self._watched = watched
        return dropped


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

    def prefix_of(self, sequence: Sequence) -> CachedPrefix:
        if sequence.state is not SequenceState.WAITING:
            return super().prefix_of(sequence)
        sequence.state = SequenceState.RESERVING
        cached = super().prefix_of(sequence)
        sequence.state = SequenceState.WAITING
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


class PraisesTheFirstHit(Roster):
    """What the cache gave at first counts, even if it was lost and computed after all."""

    def admit(self, sequence: Sequence, cached: list[BlockId], num_tokens_covered: int) -> None:
        first, was_admitted = sequence.num_cached, sequence.was_admitted
        super().admit(sequence, cached, num_tokens_covered)
        if was_admitted:
            sequence.num_cached = first


class TellsOfMovedBlocks(EngineCore):
    """Readers write into blocks that the step has yet to copy to the host."""

    def _tell_early(
        self, plan: StepPlan, allocations: list[BlocksAllocated], announce: Callable[[list[Event]], None]
    ) -> None:
        super()._tell_early(StepPlan((), 0), allocations, announce)


class RefusesTheNewcomer(EngineCore):
    """Whoever comes last finds the queue full."""

    def _who_leaves_the_queue(self, newcomer: Sequence) -> SequenceId:
        return newcomer.seq_id


class RefusesEveryone(EngineCore):
    """A full queue breaks streams that have begun."""

    @staticmethod
    def _has_nothing_to_lose(command: AddSequence | ReserveSequence) -> bool:
        return True


class PreemptsInVain(Admission):
    """Blocks that running prefills will need are counted as there for the newcomer."""

    def _who_gives_way(self, first: Sequence, room: Room) -> list[Sequence] | None:
        room.num_blocks += room.num_spoken_for
        return super()._who_gives_way(first, room)


class CountsSharedTwice(Room):
    """A block is counted as free for each victim that has it."""

    def _num_returned_by(self, victim: Sequence) -> int:
        return len(victim.block_table)


class CountsSharedBlocksTwice(Admission):
    def _room_for(self, sequence: Sequence) -> Room:
        cached = self._roster.cache.prefix_of(sequence)
        return CountsSharedTwice(self._config, self._roster, sequence, cached)


class IgnoresHits(Admission):
    """Nobody gives way to one that would fit with its cached prefix."""

    def _who_gives_way(self, first: Sequence, room: Room) -> list[Sequence] | None:
        room.num_blocks -= len(room.cached.block_ids)
        return super()._who_gives_way(first, room)


class DrainsForEveryone(Admission):
    """Whoever outranks those that run waits for them."""

    def _may_enter(self, sequence: Sequence) -> bool:
        return not (self._is_draining and self._roster.num_running)


class TakesAllTokens(Admission):
    """A prefill takes the tokens that one which outranks it could use."""

    def chunk_size(self, sequence: Sequence, budget: int, *, is_followed: bool) -> int:
        return self._limited(sequence, budget, is_followed)


class HoldsBackForNobody(Admission):
    """A long prefill leaves tokens for those that have no seat."""

    def chunk_size(self, sequence: Sequence, budget: int, *, is_followed: bool) -> int:
        is_followed = is_followed or bool(self._roster.waiting)
        return super().chunk_size(sequence, budget, is_followed=is_followed)


def with_admission(make_admission: Callable[[SchedulerConfig, Roster], Admission]) -> MakeCore:
    def make_core(
        config: SchedulerConfig, executor: Executor, eos: frozenset[int], clock: Clock, roster: Roster
    ) -> EngineCore:
        scheduler = Scheduler(config, roster, make_admission(config, roster))
        return EngineCore(config, executor, eos, clock, roster, scheduler=scheduler)

    return make_core


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


ANY_LOAD: Settings = {"preemption": "swap", "policy": "fcfs"}
RANKED_LOAD: Settings = {
    "preemption": "swap", "policy": "priority", "low_watermark": 0.1, "high_watermark": 0.3,
    "max_num_waiting": 5, "long_prefill_token_threshold": 4, "num_blocks": 11, "max_num_batched_tokens": 6,
}  # fmt: skip
TIGHT_LOAD: Settings = {**RANKED_LOAD, "low_watermark": 0.0, "high_watermark": 0.0, "num_blocks": 9}
LONG_LOAD: Settings = {**TIGHT_LOAD, "num_blocks": 14, "long_prefill_token_threshold": 0}
DRAINING_LOAD: Settings = {**RANKED_LOAD, "low_watermark": 0.5, "high_watermark": 0.9}

BUGS: dict[str, tuple[Settings, Settings]] = {
    "a share without a reference": (ANY_LOAD, {"make_roster": with_pool(SharesWithoutReference)}),
    "no copy on write": (ANY_LOAD, {"make_roster": with_pool(NeverCopies)}),
    "a stale cache entry after an invalidation": (ANY_LOAD, {"make_roster": with_pool(ForgetsNothing)}),
    "a cached prefix that was evicted": (ANY_LOAD, {"make_roster": with_pool(RemembersWhatIsGone)}),
    "blocks that are not given back": (ANY_LOAD, {"make_roster": with_pool(LosesBlocks)}),
    "a lost swap-in": (ANY_LOAD, {"make_roster": losing_swap_ins}),
    "stale KV that enters the cache": (ANY_LOAD, {"make_roster": going_on_registering}),
    "a cached last token for those that compute it": (ANY_LOAD, {"make_roster": giving_the_last_token}),
    "a failed fetch that enters the cache": (ANY_LOAD, {"make_roster": TrustsEveryFetch}),
    "choices without a seat": (ANY_LOAD, {"make_roster": TakesNoSeatForTheUnborn}),
    "host blocks that are not given back": (ANY_LOAD, {"make_roster": keeping_host_blocks}),
    "hits that are computed after all": (RANKED_LOAD, {"make_roster": PraisesTheFirstHit}),
    "blocks that are told before they are moved": (TIGHT_LOAD, {"make_core": TellsOfMovedBlocks}),
    "a newcomer that is refused for one behind it": (RANKED_LOAD, {"make_core": RefusesTheNewcomer}),
    "a stream that a full queue breaks": (RANKED_LOAD, {"make_core": RefusesEveryone}),
    "preemption in vain": (RANKED_LOAD, {"make_core": with_admission(PreemptsInVain)}),
    "preemption in vain among those that share": (
        RANKED_LOAD,
        {"make_core": with_admission(CountsSharedBlocksTwice)},
    ),
    "an inversion by a cached prefix": (TIGHT_LOAD, {"make_core": with_admission(IgnoresHits)}),
    "an inversion while draining": (DRAINING_LOAD, {"make_core": with_admission(DrainsForEveryone)}),
    "an inversion by a long prefill": (LONG_LOAD, {"make_core": with_admission(TakesAllTokens)}),
    "tokens left for nobody": (RANKED_LOAD, {"make_core": with_admission(HoldsBackForNobody)}),
}
"""A load that finds it, and what makes a `World` have it."""
