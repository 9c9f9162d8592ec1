"""The engine without thread and device: commands and steps in, events out.

A step is `plan = schedule(); result = execute(plan); events = apply(plan, result)` and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from engine.arrivals import sequence_from, why_never
from engine.choices import decode_from, drop_choice, recompute_from, why_not_from
from engine.config import SchedulerConfig
from engine.integrity import check_roster
from engine.messages import (
    AbortSequence,
    AddSequence,
    AdmitSequence,
    BlocksAllocated,
    CacheInvalidated,
    Command,
    Event,
    FirstTokens,
    InvalidateCache,
    RecomputeSequence,
    ReleaseSequence,
    ReserveSequence,
    SequenceFailed,
)
from engine.outcome import apply_result
from engine.plan import Executor, StepPlan, StepResult
from engine.roster import Roster
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceState
from engine.stats import EngineStats, StepRecord
from protocol.errors import EngineFault, InvalidRequest, Overloaded, SplitserveError
from protocol.histogram import StepHistograms
from protocol.ids import SequenceId
from protocol.ports import Clock

_NOTHING_DONE = StepResult(())


class EngineCore:
    """Deterministic: the same commands, results and clock give the same events. Used by one thread."""

    def __init__(
        self,
        config: SchedulerConfig,
        executor: Executor,
        eos_token_ids: frozenset[int],
        clock: Clock,
        roster: Roster | None = None,
        *,
        scheduler: Scheduler | None = None,
    ) -> None:
        """`roster`, and a scheduler of that, stand in for those that are made from `config`."""
        self._config = config
        self._executor = executor
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._roster = roster or Roster(config)
        self._scheduler = scheduler or Scheduler(config, self._roster)
        self._num_arrivals = 0
        self._is_blocked = False
        self._last_step = StepRecord()
        self._histograms = StepHistograms()
        self.untold_events: list[Event] = []
        """What a broken step had to tell when it broke; empty between steps."""

    @property
    def has_work(self) -> bool:
        """Whether `step` may achieve anything before the next command."""
        return not self._is_blocked and bool(self._roster.num_running or self._roster.waiting)

    @property
    def live_sequence_ids(self) -> tuple[SequenceId, ...]:
        """Every sequence that was not reported as gone, in order of arrival."""
        return tuple(self._roster.groups)

    def handle(self, command: Command) -> list[Event]:
        """Carry one command out. What fails, fails as an event; unknown ids are ignored."""
        self._is_blocked = False
        if isinstance(command, AddSequence | ReserveSequence):
            return self._enter(command)
        if isinstance(command, InvalidateCache):
            return [self._invalidate(command)]
        group = self._roster.groups.get(command.seq_id)
        failure = None if group is None else self._change(group, command)
        if failure is None:
            return []
        self._roster.drop_group(command.seq_id)
        return [SequenceFailed(command.seq_id, failure)]

    def step(self, announce: Callable[[list[Event]], None] | None = None) -> list[Event]:
        """Compute one batch. Whatever the executor raises passes through and leaves the core unusable.

        With `announce`, the step's `BlocksAllocated` are told before the device starts, so that their
        readers lose no time, but for those of blocks that the step moves; the others come first in the
        returned list.
        """
        started_s = self._clock()
        num_preemptions = self._roster.counters.num_preemptions
        plan = self._scheduler.schedule()
        allocations = self._scheduler.take_allocations()
        self.untold_events = [*allocations]
        if announce is not None and allocations:
            self._tell_early(plan, allocations, announce)
        planned_s = self._clock()
        result = _NOTHING_DONE if plan.is_empty else self._executor.execute(plan)
        executed_s = self._clock()
        apply_result(self._roster, plan, result, self.untold_events)
        self._is_blocked = plan.is_empty and num_preemptions == self._roster.counters.num_preemptions
        if plan.slices:
            applied_s = self._clock()
            self._last_step = StepRecord(
                planned_s - started_s,
                executed_s - planned_s,
                applied_s - executed_s,
                len(plan.slices),
                plan.num_tokens,
            )
            self._histograms.observe(**self._last_step._asdict())
        return self._take_untold()

    def abort_all(self, error: SplitserveError) -> list[Event]:
        """Drop every live sequence and report it failed. No read into their blocks may be pending."""
        failures: list[Event] = []
        for seq_id in self.live_sequence_ids:
            self._roster.drop_group(seq_id)
            failures.append(SequenceFailed(seq_id, error))
        return failures

    def stats(self) -> EngineStats:
        roster, counters, last = self._roster, self._roster.counters, self._last_step
        return EngineStats(
            num_running=roster.num_running,
            num_waiting=roster.waiting.num_waiting,
            num_swapped=roster.waiting.num_swapped,
            num_held=roster.num_held,
            num_reserving=roster.waiting.num_reserving,
            num_fetching=roster.num_fetching,
            num_waiting_tokens=roster.waiting.num_waiting_tokens
            + sum(sequence.num_pending for sequence in roster.prefills),
            blocks_total=roster.pool.num_total,
            blocks_free=roster.pool.num_free,
            blocks_cached=roster.pool.num_cached,
            host_blocks_total=roster.swapper.pool.num_total,
            host_blocks_free=roster.swapper.pool.num_free,
            **asdict(counters),
            last_schedule_s=last.schedule_s,
            last_execute_s=last.execute_s,
            last_apply_s=last.apply_s,
            last_num_seqs=last.num_seqs,
            last_num_tokens=last.num_tokens,
            steps=self._histograms.snapshot(),
        )

    def check_integrity(self) -> None:
        """Raise `EngineFault` unless blocks, tables and states agree with each other."""
        check_roster(self._roster, self._config)

    def assert_idle(self) -> None:
        """Raise `EngineFault` unless no sequence lives and every block is free."""
        if self._roster.groups:
            raise EngineFault(f"sequences live in an idle engine: {', '.join(self._roster.groups)}")
        self.check_integrity()
        self._roster.pool.assert_idle()

    def _take_untold(self) -> list[Event]:
        events, self.untold_events = self.untold_events, []
        return events

    def _tell_early(
        self, plan: StepPlan, allocations: list[BlocksAllocated], announce: Callable[[list[Event]], None]
    ) -> None:
        """Whoever hears of blocks may write them at once, so nobody hears of those that are to be moved."""
        moved = plan.moved_block_ids
        early: list[Event] = [event for event in allocations if moved.isdisjoint(event.block_ids)]
        self.untold_events = [event for event in allocations if not moved.isdisjoint(event.block_ids)]
        if early:
            announce(early)

    def _enter(self, command: AddSequence | ReserveSequence) -> list[Event]:
        """Take a new sequence in, or refuse it."""
        if command.seq_id in self._roster.groups:
            return [SequenceFailed(command.seq_id, InvalidRequest("the sequence id is in use"))]
        sequence = sequence_from(
            command, self._config, self._eos_token_ids, self._num_arrivals, self._clock()
        )
        never = why_never(sequence, self._config)
        if never is not None:
            return [SequenceFailed(command.seq_id, never)]
        events: list[Event] = []
        if self._has_nothing_to_lose(command) and self._is_queue_full:
            loser = self._who_leaves_the_queue(sequence)
            events.append(SequenceFailed(loser, self._overloaded()))
            if loser == command.seq_id:
                return events
            self._roster.drop_group(loser)
        self._num_arrivals += 1
        self._roster.add(sequence)
        self._scheduler.reserve_waiting()
        return events + self._scheduler.take_allocations()

    @staticmethod
    def _has_nothing_to_lose(command: AddSequence | ReserveSequence) -> bool:
        """Its client has no token yet: it may be refused as overload, and be sent elsewhere."""
        return isinstance(command, AddSequence) and not command.output_token_ids

    @property
    def _is_queue_full(self) -> bool:
        waiting = self._roster.waiting
        return waiting.num_waiting + waiting.num_swapped >= self._config.max_num_waiting

    def _who_leaves_the_queue(self, newcomer: Sequence) -> SequenceId:
        """The newcomer, unless it outranks the last of those whose clients have no token yet either."""
        last = self._roster.waiting.last_untouched
        is_outranked = last is not None and self._roster.policy.outranks(newcomer, last)
        return last.seq_id if last is not None and is_outranked else newcomer.seq_id

    def _overloaded(self) -> Overloaded:
        return Overloaded(
            f"{self._config.max_num_waiting} sequences wait already",
            retry_after_s=self._config.overload_retry_after_s,
        )

    def _invalidate(self, command: InvalidateCache) -> CacheInvalidated:
        roster = self._roster
        live = [sequence for group in roster.groups.values() for sequence in group]
        num_blocks = roster.cache.invalidate(command.token_ids, command.cache_salt, live)
        roster.counters.invalidated_blocks += num_blocks
        self._compute_again_what_is_handed_out()
        held = (sequence for sequence in live if sequence.state is SequenceState.HELD)
        return CacheInvalidated(command.seq_id, tuple(s.seq_id for s in held if s.is_stale))

    def _compute_again_what_is_handed_out(self) -> None:
        """Whoever reads the KV of a `hold` sequence caches it, and can't tell that it is stale.

        So those that are still being computed start over. Those that are HELD may be read already, and so
        it is their tickets that must become void: see `CacheInvalidated`.
        """
        for sequence in [sequence for sequence in self._roster.prefills if sequence.hold]:
            if sequence.is_stale:
                self._roster.recompute(sequence)

    def _change(
        self,
        group: list[Sequence],
        command: AdmitSequence | RecomputeSequence | AbortSequence | ReleaseSequence,
    ) -> SplitserveError | None:
        """Returns why the sequence fails; None when it does not."""
        sequence = group[0]  # the only one before the others are born
        state = sequence.state
        match command:
            case AdmitSequence() if state is SequenceState.FETCHING:
                return self._go_on(decode_from, sequence, command.first_tokens)
            case RecomputeSequence() if state in (SequenceState.FETCHING, SequenceState.RESERVING):
                return self._go_on(recompute_from, sequence, command.first_tokens)
            case ReleaseSequence() if sequence.hold:
                # Released before it is HELD: nobody will read the blocks, so the rest need not be computed.
                self._roster.drop(sequence)
            case AbortSequence(index=None):
                self._roster.drop_group(sequence.seq_id)
            case AbortSequence(index=int(index)):
                drop_choice(self._roster, group, index)
            case _:
                return EngineFault(f"{type(command).__name__} came for a sequence that is {state}")
        return None

    def _go_on(
        self,
        start: Callable[[Roster, Sequence, FirstTokens], None],
        sequence: Sequence,
        first_tokens: FirstTokens,
    ) -> InvalidRequest | None:
        refusal = why_not_from(sequence, first_tokens)
        if refusal is None:
            start(self._roster, sequence, first_tokens)
        return refusal
