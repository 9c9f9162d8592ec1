"""Does a plan do right by those that wait, and by those that give way? Said again, slowly, with sets."""

from __future__ import annotations

from engine_harness import Engine

from engine.plan import StepPlan
from engine.sequence import Sequence, SequenceState


class Fairness:
    """Compares the roster before a step with that on which its plan was made."""

    def __init__(self, engine: Engine) -> None:
        self._config = engine.config
        self._roster = engine.roster
        self._was_running: dict[Sequence, int] = {}
        self._was_computed: dict[Sequence, int] = {}
        self._was_waiting: list[Sequence] = []

    def before_step(self) -> None:
        self._was_running = {s: len(s.block_table) for s in (*self._roster.decodes, *self._roster.prefills)}
        self._was_computed = {s: s.num_computed for s in self._was_running}
        self._was_waiting = self._roster.waiting.sequences()

    def look_at(self, plan: StepPlan) -> None:
        """Between the plan and its execution."""
        waits = (SequenceState.WAITING, SequenceState.SWAPPED)
        victims = [s for s in self._was_running if s.state in waits]
        entered = [s for s in self._was_waiting if s.block_table] + self._who_gave_way_and_came_back()
        self._nobody_gave_way_for_nothing(victims, entered)
        if not victims and not plan.copies:
            self._the_first_one_got_what_it_outranks()
        if not entered:
            self._a_long_prefill_alone_is_not_held_back(plan)

    def _who_gave_way_and_came_back(self) -> list[Sequence]:
        """Within this very step: its blocks were short, but what others had cached made up for it."""
        return [
            s for s, computed in self._was_computed.items() if s.block_table and s.num_computed < computed
        ]

    def who_is_refused(self, newcomer: str, priority: int) -> str | None:
        """When one more is to be computed here; None when the queue has room."""
        waits = (SequenceState.WAITING, SequenceState.SWAPPED)
        waiting = [s for s in self._roster.waiting.sequences() if s.state in waits]
        if len(waiting) < self._config.max_num_waiting:
            return None
        fresh = [s for s in waiting if not s.was_admitted and not s.num_output_tokens]
        last = max(fresh, key=lambda s: (s.priority, s.arrival_index), default=None)
        if self._config.policy == "priority" and last is not None and last.priority > priority:
            return last.seq_id
        return newcomer

    def _nobody_gave_way_for_nothing(self, victims: list[Sequence], entered: list[Sequence]) -> None:
        """It is for someone who got in, or because blocks were short."""
        outranks = self._roster.policy.outranks
        if not victims or any(outranks(newcomer, victim) for newcomer in entered for victim in victims):
            return
        most = max(self._was_running[victim] for victim in victims)
        assert self._roster.pool.num_free <= most, f"{victims[0].seq_id} gave way for nothing"

    def _the_first_one_got_what_it_outranks(self) -> None:
        first = self._roster.waiting.first
        if first is None or self._was_waiting[:1] != [first]:
            return
        running, outranks = [*self._roster.decodes, *self._roster.prefills], self._roster.policy.outranks
        if not any(outranks(first, other) for other in running):
            return
        gone = {other for other in self._roster.preemptible() if outranks(first, other)}
        assert not self._gets_in(first, gone), f"{first.seq_id} waits for those that it outranks"

    def _gets_in(self, first: Sequence, gone: set[Sequence]) -> bool:
        roster, config = self._roster, self._config
        stay = [s for group in roster.groups.values() for s in group if s not in gone]
        running = [s for s in stay if s.state is SequenceState.RUNNING]
        seated = [*running, *(s for s in stay if s.state is SequenceState.FETCHING), first]
        if sum(1 + s.num_unborn for s in seated) > config.max_num_seqs:
            return False
        cached = {*roster.cache.prefix_of(first).block_ids}
        used = {block_id for s in stay for block_id in s.block_table} | cached
        prefills = [s for s in running if s in roster.prefills]
        promised = sum(config.blocks_for(len(s.token_ids)) - len(s.block_table) for s in prefills)
        needed = config.blocks_for(len(first.token_ids)) - len(cached) + promised
        if needed > roster.pool.num_total - len(used) - (config.num_low_blocks if running else 0):
            return False
        limit = config.long_prefill_token_threshold or config.max_model_len
        ahead = [s for s in prefills if not roster.policy.outranks(first, s)]
        num_tokens = config.prefill_budget(sum(s in roster.decodes for s in running))
        return first.state is SequenceState.RESERVING or num_tokens > sum(
            min(limit, s.num_pending) for s in ahead
        )

    def _a_long_prefill_alone_is_not_held_back(self, plan: StepPlan) -> None:
        roster, first = self._roster, self._roster.waiting.first
        has_seat = first is not None and roster.num_seats_taken + 1 + first.num_unborn <= (
            self._config.max_num_seqs
        )
        if has_seat or len(roster.prefills) != 1:
            return
        (prefill,) = roster.prefills
        most = min(prefill.num_pending, self._config.prefill_budget(len(roster.decodes)))
        given = sum(part.num_tokens for part in plan.slices if part.sequence is prefill)
        assert given == most or not roster.pool.num_free, f"{prefill.seq_id} is held back for nobody"
