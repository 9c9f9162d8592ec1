"""Which tokens of which sequences does the next step compute?

There are no phases. A step hands out a budget of tokens: one to every sequence that decodes, then
chunks to those that are further behind, then first chunks to those that wait. Blocks are taken on
demand, except for `hold` and reserved sequences, whose blocks others read or write: those get all
at once and are never preempted in that role.

When blocks run out, a sequence takes them from the last one behind it in the policy's order, which
starts over later; with nobody behind it, it stalls. So the first sequence always runs on, and nobody
loses work for someone behind.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.config import SchedulerConfig
from engine.messages import BlocksAllocated, Event
from engine.plan import Slice, StepPlan
from engine.policy import choose_victim
from engine.roster import Roster
from engine.sequence import Sequence, SequenceState
from protocol.ids import BlockId, SequenceId


class Scheduler:
    """Plans steps over a roster. Reads no clock and knows no tokens' meaning."""

    def __init__(self, config: SchedulerConfig, roster: Roster) -> None:
        self._config = config
        self._roster = roster
        self._tables = roster.tables
        self._allocations: list[Event] = []

    def schedule(self) -> StepPlan:
        """Decide the next step; the tables cover all of it when this returns."""
        stalled = self._grow_decodes()
        chunks = self._plan_chunks(self._prefill_budget())
        chunks += self.admit(self._prefill_budget() - sum(chunk.num_tokens for chunk in chunks))
        # Only now: making room for a chunk may have preempted a decode.
        decodes = list(self._roster.decodes.values())
        if stalled:
            decodes = [decode for decode in decodes if decode.sequence.seq_id not in stalled]
        num_tokens = len(decodes) + sum(chunk.num_tokens for chunk in chunks)
        return StepPlan(decodes + chunks, num_tokens, len(decodes))

    def admit(self, budget: int) -> list[Slice]:
        """Admit the first ones that wait while seats, blocks and tokens last; nobody is overtaken.

        Returns their first chunks. A reserved sequence takes no tokens, so it needs no budget.
        """
        chunks: list[Slice] = []
        while (sequence := self._roster.waiting.first) is not None and self._has_seat():
            if sequence.state is SequenceState.RESERVING:
                if not self._admit_whole(sequence, len(sequence.token_ids) - 1):
                    break
                continue
            if budget <= 0 or not self._admit_running(sequence, budget):
                break
            chunks.append(Slice(sequence, min(sequence.num_pending, budget)))
            budget -= chunks[-1].num_tokens
        return chunks

    def take_allocations(self) -> list[Event]:
        """Return the allocations since the last call; they come before all else about their sequences."""
        allocations, self._allocations = self._allocations, []
        return allocations

    # ---- Those that run ----

    def _prefill_budget(self) -> int:
        budget = self._config.max_num_batched_tokens - len(self._roster.decodes)
        limit = self._config.max_num_prefill_tokens
        return budget if limit is None else min(budget, limit)

    def _grow_decodes(self) -> set[SequenceId]:
        """Give every decode at a block boundary its next block; returns those that must sit out."""
        decodes, block_size = self._roster.decodes, self._config.block_size
        due = [sequence for sequence, _ in decodes.values() if not sequence.num_computed % block_size]
        for sequence in due:
            self._tables.register(sequence)
        if self._tables.extend_each(due):
            return set()
        stalled: set[SequenceId] = set()
        for sequence in sorted(due, key=self._roster.policy.key):
            if sequence.seq_id not in decodes:
                continue  # preempted by one before it
            if not self._make_room(sequence, 1):
                stalled.add(sequence.seq_id)
        return stalled

    def _plan_chunks(self, budget: int) -> list[Slice]:
        prefills = self._roster.prefills
        chunks: list[Slice] = []
        for sequence in sorted(prefills.values(), key=self._roster.policy.key):
            if budget <= 0:
                break
            if sequence.seq_id not in prefills:
                continue  # preempted by one before it
            num_tokens = self._make_room(sequence, min(sequence.num_pending, budget))
            if num_tokens:
                chunks.append(Slice(sequence, num_tokens))
                budget -= num_tokens
        return chunks

    def _make_room(self, sequence: Sequence, num_tokens: int) -> int:
        """Extend the table for the next `num_tokens` tokens; returns for how many that worked."""
        while not self._tables.extend(sequence, sequence.num_computed + num_tokens):
            victim = choose_victim(self._roster.policy, self._preemptible(), sequence)
            if victim is None:
                num_tokens = max(self._tables.max_coverage(sequence) - sequence.num_computed, 0)
            else:
                self._roster.preempt(victim)
        return num_tokens

    def _preemptible(self) -> Iterator[Sequence]:
        yield from (decode.sequence for decode in self._roster.decodes.values())
        yield from (sequence for sequence in self._roster.prefills.values() if not sequence.hold)

    # ---- Those that wait ----

    def _has_seat(self) -> bool:
        return self._roster.num_seats_taken < self._config.max_num_seqs

    def _admit_running(self, sequence: Sequence, budget: int) -> bool:
        if sequence.hold:
            return self._admit_whole(sequence, len(sequence.token_ids))
        cached = self._tables.cached_prefix(sequence)
        if not self._fits(cached, len(sequence.token_ids)):
            return False
        num_cached = len(cached) * self._config.block_size
        first_chunk_end = min(num_cached + budget, len(sequence.token_ids))
        self._roster.admit(sequence, cached, first_chunk_end)
        return True

    def _admit_whole(self, sequence: Sequence, num_tokens: int) -> bool:
        """Admit with blocks for `num_tokens` tokens, and announce them."""
        cached = self._tables.cached_prefix(sequence)
        if not self._fits(cached, num_tokens):
            return False
        self._roster.admit(sequence, cached, num_tokens)
        self._allocations.append(
            BlocksAllocated(sequence.seq_id, tuple(sequence.block_table), sequence.num_computed)
        )
        return True

    def _fits(self, cached: list[BlockId], num_tokens: int) -> bool:
        """Whether a table for all of a sequence's tokens leaves what others count on."""
        num_blocks = self._config.blocks_for(num_tokens)
        return self._tables.num_free_after(cached, num_blocks) >= self._num_spoken_for()

    def _num_spoken_for(self) -> int:
        """Free blocks that admitted prefills will need, and the watermark while anyone runs."""
        promised = sum(
            self._config.blocks_for(len(sequence.token_ids)) - len(sequence.block_table)
            for sequence in self._roster.prefills.values()
        )
        return promised + (self._config.num_watermark_blocks if self._roster.num_running else 0)
