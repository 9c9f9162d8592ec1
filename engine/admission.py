"""Who of those that wait gets a seat and blocks now, and whom may it send back to waiting for that?

In the policy's order; nobody is overtaken. An admission leaves the blocks that admitted prefills will
need, and the low watermark while anyone runs. Once fewer are free than that, nobody is admitted beside
others until the high watermark is free: so those that run are not preempted for newcomers again and
again. Alone, whoever fits into the pool is admitted. Whoever outranks one of those that run (`priority`)
waits for no draining, and takes from those that it outranks what it lacks: seats, blocks, and tokens.
"""

from __future__ import annotations

from itertools import chain

from engine.config import SchedulerConfig
from engine.messages import BlocksAllocated
from engine.plan import Slice
from engine.room import Room, who_gives_way
from engine.roster import Roster
from engine.sequence import Sequence, SequenceState


class Admission:
    """Moves sequences out of the waiting queue. Used by the scheduler alone."""

    def __init__(self, config: SchedulerConfig, roster: Roster) -> None:
        self._config = config
        self._roster = roster
        self._allocations: list[BlocksAllocated] = []
        self._is_draining = False
        self._entrant: Sequence | None = None
        """While a step is planned: the first one waiting, if it gets in at the end of that."""
        self._hopeless: tuple[Sequence, int, int] | None = None
        """For whom all that it outranks were too few, when so many had come and gone."""

    def take_allocations(self) -> list[BlocksAllocated]:
        allocations, self._allocations = self._allocations, []
        return allocations

    def look_at_watermarks(self) -> None:
        """Start to drain below the low watermark, stop at the high one."""
        num_free = self._roster.pool.num_free
        if num_free < self._config.num_low_blocks:
            self._is_draining = True
        elif num_free >= self._config.num_high_blocks:
            self._is_draining = False

    def look_at_first(self) -> None:
        """See whether the first one waiting gets in, if need be in the place of those that it outranks.

        Nobody gives way unless it does.
        """
        first = self._roster.waiting.first
        if first is None or not self._may_enter(first):
            return
        room = self._room_for(first)
        victims: list[Sequence] | None = []
        if self._roster.policy.preempts_for_arrivals:
            victims = self._who_gives_way(first, room)
        if victims is None or not room.is_enough:
            return
        for victim in victims:
            self._roster.preempt(victim)
        self._entrant = first

    def admit(self, budget: int) -> list[Slice]:
        """Admit the first ones that wait while seats, blocks and tokens last; returns their first chunks.

        A reserved sequence takes no tokens, so it needs no budget.
        """
        chunks: list[Slice] = []
        while (sequence := self._roster.waiting.first) is not None and self._may_enter(sequence):
            room = self._room_for(sequence)
            if not room.is_enough:
                break
            if sequence.state is SequenceState.RESERVING:
                self._admit_whole(sequence)
                continue
            is_followed = room.num_seats > 0 and len(self._roster.waiting) > 1
            num_tokens = self._limited(sequence, budget, is_followed)
            if num_tokens <= 0:
                break
            self._admit_running(sequence, num_tokens)
            num_tokens = min(num_tokens, sequence.num_pending)
            budget -= num_tokens
            if is_decode(sequence) and not sequence.hold:
                self._roster.start_decoding(sequence)
            else:
                chunks.append(Slice(sequence, num_tokens))
        self._entrant = None
        return chunks

    def chunk_size(self, sequence: Sequence, budget: int, *, is_followed: bool) -> int:
        """How many tokens a running sequence may compute in this step.

        It leaves those that one needs which gets in and outranks it; and a long prefill leaves some to
        whoever can use them: those that run and follow it, or the one that gets in.
        """
        entrant = self._entrant
        if entrant is None or entrant.state is SequenceState.RESERVING:
            return self._limited(sequence, budget, is_followed)
        if self._roster.policy.outranks(entrant, sequence):
            num_cached = len(self._roster.cache.prefix_of(entrant).block_ids) * self._config.block_size
            num_tokens = len(entrant.token_ids) - max(num_cached, entrant.num_computed)
            budget -= min(num_tokens, self._limited(entrant, budget, is_followed=True))
        return self._limited(sequence, budget, is_followed=True)

    def _limited(self, sequence: Sequence, budget: int, is_followed: bool) -> int:
        limit = self._config.long_prefill_token_threshold
        if limit and is_followed and sequence.num_pending > limit:
            return min(budget, limit)
        return budget

    # ---- Who gets in ----

    def _may_enter(self, sequence: Sequence) -> bool:
        """Whether draining, which is for the sake of those that run, lets it pass."""
        if not (self._is_draining and self._roster.num_running) or sequence is self._entrant:
            return True
        policy = self._roster.policy
        running = chain(self._roster.decodes, self._roster.prefills)
        return policy.preempts_for_arrivals and any(policy.outranks(sequence, other) for other in running)

    def _room_for(self, sequence: Sequence) -> Room:
        return Room(self._config, self._roster, sequence, self._roster.cache.prefix_of(sequence))

    def _who_gives_way(self, first: Sequence, room: Room) -> list[Sequence] | None:
        """None when nobody need bother, because it would not be enough."""
        outranked = [s for s in self._roster.preemptible() if self._roster.policy.outranks(first, s)]
        if not room.may_be_enough_without(outranked):
            return None
        # To count blocks is slow. Until somebody comes or goes, or more is cached, they only get fewer; but
        # for those that stay referenced in this step alone, because they are to be copied.
        case = first, self._roster.num_changes, len(room.cached.block_ids)
        if case == self._hopeless:
            return None
        victims = who_gives_way(room, outranked, self._roster)
        if victims is None and not self._roster.moves.copies:
            self._hopeless = case
        return victims

    # ---- Into the roster ----

    def _admit_running(self, sequence: Sequence, num_tokens: int) -> None:
        if sequence.hold:
            self._admit_whole(sequence)
            return
        cached = self._roster.cache.prefix_of(sequence).block_ids
        start = max(len(cached) * self._config.block_size, sequence.num_computed)
        self._roster.admit(sequence, cached, min(start + num_tokens, len(sequence.token_ids)))

    def _admit_whole(self, sequence: Sequence) -> None:
        """Admit with blocks for all tokens, and announce them."""
        cached = self._roster.cache.prefix_of(sequence).block_ids
        self._roster.admit(sequence, cached, len(sequence.token_ids))
        self._allocations.append(
            BlocksAllocated(sequence.seq_id, tuple(sequence.block_table), sequence.num_computed)
        )


def is_decode(sequence: Sequence) -> bool:
    """Whether an admitted sequence only goes on with its last token, as those do that were swapped."""
    return sequence.num_pending == 1 and sequence.num_output_tokens > 0 and not sequence.num_unborn
