"""Who of those that wait gets a seat and blocks now, and whom may it send back to waiting for that?

In the policy's order; nobody is overtaken. An admission leaves the blocks that admitted prefills will
need, and the low watermark while anyone runs. Once fewer are free than that, nobody is admitted beside
others until the high watermark is free: so those that run are not preempted for newcomers again and
again. Alone, whoever fits into the pool is admitted.
"""

from __future__ import annotations

from engine.config import SchedulerConfig
from engine.messages import BlocksAllocated, Event
from engine.plan import Slice
from engine.roster import Roster
from engine.sequence import Sequence, SequenceState
from protocol.ids import BlockId


class Admission:
    """Moves sequences out of the waiting queue. Used by the scheduler alone."""

    def __init__(self, config: SchedulerConfig, roster: Roster) -> None:
        self._config = config
        self._roster = roster
        self._tables = roster.tables
        self._allocations: list[Event] = []
        self._is_draining = False

    def take_allocations(self) -> list[Event]:
        allocations, self._allocations = self._allocations, []
        return allocations

    def look_at_watermarks(self) -> None:
        """Start to drain below the low watermark, stop at the high one."""
        num_free = self._roster.pool.num_free
        if num_free < self._config.num_low_blocks:
            self._is_draining = True
        elif num_free >= self._config.num_high_blocks:
            self._is_draining = False

    def admit(self, budget: int) -> list[Slice]:
        """Admit the first ones that wait while seats, blocks and tokens last; returns their first chunks.

        A reserved sequence takes no tokens, so it needs no budget.
        """
        chunks: list[Slice] = []
        while (sequence := self._roster.waiting.first) is not None and self._may_enter(sequence):
            if sequence.state is SequenceState.RESERVING:
                if not self._admit_whole(sequence):
                    break
                continue
            num_tokens = self.chunk_size(sequence, budget)
            if num_tokens <= 0 or not self._admit_running(sequence, num_tokens):
                break
            num_tokens = min(num_tokens, sequence.num_pending)
            budget -= num_tokens
            if is_decode(sequence) and not sequence.hold:
                self._roster.start_decoding(sequence)
            else:
                chunks.append(Slice(sequence, num_tokens))
        return chunks

    def chunk_size(self, sequence: Sequence, budget: int) -> int:
        """How many tokens a sequence may compute in this step: a long prefill leaves some to others."""
        limit = self._config.long_prefill_token_threshold
        others = len(self._roster.prefills) + len(self._roster.waiting) - 1
        if limit and others and sequence.num_pending > limit:
            return min(budget, limit)
        return budget

    def make_way(self) -> None:
        """Preempt those that the first one waiting outranks, when that gives it what it lacks."""
        first = self._roster.waiting.first
        if first is None or not self._roster.policy.preempts_for_arrivals:
            return
        outranked = [running for running in self._roster.preemptible() if self._outranks(first, running)]
        if not outranked or not self._would_fit_without(first, outranked):
            return
        if not self._would_get_tokens_without(first, outranked):
            return  # those that it can't outrank take the whole step: nobody gives way for nothing
        outranked.sort(key=self._roster.policy.key)
        while outranked and not (self._has_seats(first) and self._fits_now(first)):
            self._roster.preempt(outranked.pop())
            self._is_draining = False

    # ---- Seats and blocks ----

    def _may_enter(self, sequence: Sequence) -> bool:
        return self._has_seats(sequence) and not (self._is_draining and self._roster.num_running)

    def _has_seats(self, sequence: Sequence) -> bool:
        return self._roster.num_seats_taken + 1 + sequence.num_unborn <= self._config.max_num_seqs

    def _outranks(self, waiting: Sequence, running: Sequence) -> bool:
        return self._roster.policy.outranks(waiting, running)

    def _would_fit_without(self, first: Sequence, others: list[Sequence]) -> bool:
        """Whether preempting all of `others` may be enough; blocks that they share count twice."""
        num_seats = sum(1 + sequence.num_unborn for sequence in others)
        num_blocks = sum(len(sequence.block_table) for sequence in others)
        num_left = self._roster.num_seats_taken - num_seats + 1 + first.num_unborn
        needed = self._config.blocks_for(len(first.token_ids))
        return num_left <= self._config.max_num_seqs and needed <= self._roster.pool.num_free + num_blocks

    def _would_get_tokens_without(self, first: Sequence, others: list[Sequence]) -> bool:
        """Whether those that run on beside `first` leave it tokens of this step, if it needs any."""
        if first.state is SequenceState.RESERVING:
            return True
        gone = set(others)
        budget = self._config.max_num_batched_tokens - sum(s not in gone for s in self._roster.decodes)
        if self._config.max_num_prefill_tokens is not None:
            budget = min(budget, self._config.max_num_prefill_tokens)
        for sequence in self._roster.prefills:
            if sequence not in gone:
                budget -= min(sequence.num_pending, self.chunk_size(sequence, budget))
        return budget > 0

    def _fits_now(self, sequence: Sequence) -> bool:
        return self._fits(sequence, self._cached(sequence))

    def _fits(self, sequence: Sequence, cached: list[BlockId]) -> bool:
        """Whether a table for all of a sequence's tokens leaves what others count on."""
        num_blocks = self._config.blocks_for(len(sequence.token_ids))
        return self._tables.num_free_after(cached, num_blocks) >= self._num_spoken_for()

    def _num_spoken_for(self) -> int:
        """Free blocks that admitted prefills will need, and the low watermark while anyone runs."""
        promised = sum(
            self._config.blocks_for(len(sequence.token_ids)) - len(sequence.block_table)
            for sequence in self._roster.prefills
        )
        return promised + (self._config.num_low_blocks if self._roster.num_running else 0)

    def _cached(self, sequence: Sequence) -> list[BlockId]:
        """What the prefix cache gives; of a SWAPPED sequence only what it would else take from the host."""
        cached = self._roster.cache.prefix_of(sequence)
        if sequence.state is SequenceState.SWAPPED:
            return cached[: sequence.num_computed // self._config.block_size]
        return cached

    # ---- Into the roster ----

    def _admit_running(self, sequence: Sequence, num_tokens: int) -> bool:
        if sequence.hold:
            return self._admit_whole(sequence)
        cached = self._cached(sequence)
        if not self._fits(sequence, cached):
            return False
        start = max(len(cached) * self._config.block_size, sequence.num_computed)
        self._roster.admit(sequence, cached, min(start + num_tokens, len(sequence.token_ids)))
        return True

    def _admit_whole(self, sequence: Sequence) -> bool:
        """Admit with blocks for all tokens, and announce them."""
        cached = self._cached(sequence)
        if not self._fits(sequence, cached):
            return False
        self._roster.admit(sequence, cached, len(sequence.token_ids))
        self._allocations.append(
            BlocksAllocated(sequence.seq_id, tuple(sequence.block_table), sequence.num_computed)
        )
        return True


def is_decode(sequence: Sequence) -> bool:
    """Whether an admitted sequence only goes on with its last token, as those do that were swapped."""
    return sequence.num_pending == 1 and sequence.num_output_tokens > 0 and not sequence.num_unborn
