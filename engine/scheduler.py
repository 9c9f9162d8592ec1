"""Which tokens of which sequences does the next step compute?

There are no phases. A step hands out a budget of tokens: one to every sequence that decodes, then
chunks to those that are further behind, then first chunks to those that wait. Blocks are taken on
demand, except for `hold` and reserved sequences, whose blocks others read or write: those get all
at once and are never preempted in that role.

When blocks run out, a sequence takes them from the last one behind it in the policy's order, which
waits again; with nobody behind it, it stalls. So the first sequence always runs on, and nobody
loses work for someone behind.
"""

from __future__ import annotations

from engine.admission import Admission
from engine.config import SchedulerConfig
from engine.messages import BlocksAllocated
from engine.plan import Slice, StepPlan
from engine.policy import choose_victim
from engine.roster import Roster
from engine.sequence import Sequence


class Scheduler:
    """Plans steps over a roster. Reads no clock and knows no tokens' meaning."""

    def __init__(self, config: SchedulerConfig, roster: Roster, admission: Admission | None = None) -> None:
        """`admission` stands in for the one that is made from `config`."""
        self._config = config
        self._roster = roster
        self._tables = roster.tables
        self._admission = admission or Admission(config, roster)

    def schedule(self) -> StepPlan:
        """Decide the next step; the tables cover all of it when this returns."""
        self._admission.look_at_watermarks()
        stalled = self._grow_decodes()
        self._admission.look_at_first()
        chunks = self._plan_chunks(self._prefill_budget())
        chunks += self._admission.admit(self._prefill_budget() - sum(chunk.num_tokens for chunk in chunks))
        # Only now: making room for a chunk may have preempted a decode, and one may be back from the host.
        decodes = list(self._roster.decodes.values())
        if stalled:
            decodes = [decode for decode in decodes if decode.sequence not in stalled]
        return self._plan(decodes, chunks)

    def reserve_waiting(self) -> None:
        """Give blocks to reserved sequences between steps, as far as it is their turn."""
        self._admission.admit(budget=0)

    def take_allocations(self) -> list[BlocksAllocated]:
        """Return the allocations since the last call; they come before all else about their sequences."""
        return self._admission.take_allocations()

    def _plan(self, decodes: list[Slice], chunks: list[Slice]) -> StepPlan:
        moves = self._roster.moves
        num_tokens = len(decodes) + sum(chunk.num_tokens for chunk in chunks)
        if not (moves.copies or moves.swaps_out or moves.swaps_in):
            return StepPlan(decodes + chunks, num_tokens, len(decodes))
        copies = tuple(moves.copies.values())
        plan = StepPlan(
            decodes + chunks,
            num_tokens,
            len(decodes),
            copies,
            tuple(moves.swaps_out),
            tuple(moves.swaps_in),
        )
        self._roster.counters.copied_blocks += len(copies)
        self._tables.release_copied()
        moves.clear()
        return plan

    def _prefill_budget(self) -> int:
        return self._config.prefill_budget(len(self._roster.decodes))

    def _grow_decodes(self) -> set[Sequence]:
        """Give every decode a block of its own for its next token; returns those that must sit out."""
        roster, block_size = self._roster, self._config.block_size
        due = [sequence for sequence in roster.decodes if not sequence.num_computed % block_size]
        for sequence in due:
            roster.cache.register(sequence)
        due += [sequence for sequence in roster.newborn if sequence.num_computed % block_size]
        if self._tables.extend_each(due):
            roster.newborn.clear()
            return set()
        return self._grow_in_order(due)

    def _grow_in_order(self, due: list[Sequence]) -> set[Sequence]:
        """Blocks are short: the first ones take them from the last ones."""
        stalled: set[Sequence] = set()
        for sequence in sorted(due, key=self._roster.policy.key):
            if sequence not in self._roster.decodes:
                continue  # preempted by one before it
            if self._make_room(sequence, 1):
                self._roster.newborn.pop(sequence, None)
            else:
                stalled.add(sequence)
        return stalled

    def _plan_chunks(self, budget: int) -> list[Slice]:
        prefills = self._roster.prefills
        chunks: list[Slice] = []
        in_order = sorted(prefills, key=self._roster.policy.key)
        for sequence in in_order:
            if budget <= 0:
                break
            if sequence not in prefills:
                continue  # preempted by one before it
            is_followed = sequence is not in_order[-1]
            num_tokens = self._admission.chunk_size(sequence, budget, is_followed=is_followed)
            num_tokens = self._make_room(sequence, min(sequence.num_pending, num_tokens))
            if num_tokens:
                chunks.append(Slice(sequence, num_tokens))
                budget -= num_tokens
        return chunks

    def _make_room(self, sequence: Sequence, num_tokens: int) -> int:
        """Extend the table for the next `num_tokens` tokens; returns for how many that worked."""
        while num_tokens and not self._tables.extend(sequence, sequence.num_computed + num_tokens):
            victim = choose_victim(self._roster.policy, self._roster.preemptible(), sequence)
            if victim is None:
                num_tokens = min(num_tokens, self._tables.max_pending(sequence))
            else:
                self._roster.preempt(victim)
        return num_tokens
