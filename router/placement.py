"""Which workers does a leg get? Waits until there are some, and until one of them has credit.

A decode worker's credit comes first: no prompt is computed whose KV nobody could take over. Every wait
is bounded by the request's deadline; that for workers which are not there at all by `worker_wait_s`, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from typing import TypeVar

from protocol.errors import SplitserveError, WorkerUnavailable
from protocol.generation import GenerationRequest
from protocol.ids import Role, WorkerIdentity
from protocol.ports import Clock
from router.credit import Order, WaitsFor
from router.deadline import deadline_exceeded
from router.kinds import of_contents, paired_with
from router.policy import RoutingPolicy
from router.ports import (
    DecodeWorker,
    LegObserver,
    LocalReason,
    PrefillWorker,
    Worker,
    Workers,
    num_usable,
)
from router.run import Run
from router.seat import Alone, Local, Paired, Place, Seat, can_seat
from router.settings import RouterSettings

W = TypeVar("W", bound=Worker)


class Placement:
    """Finds places for legs. Used on one event loop."""

    def __init__(
        self,
        workers: Workers,
        policy: RoutingPolicy,
        settings: RouterSettings,
        clock: Clock,
        observer: LegObserver,
    ) -> None:
        self._workers = workers
        self._policy = policy
        self._settings = settings
        self._clock = clock
        self._observer = observer

    async def find(self, run: Run) -> Place:
        """A place for the request's next leg. Whoever asked releases the seat.

        Raises `WorkerUnavailable` and `DeadlineExceeded`.
        """
        leg = run.leg()
        while True:
            reason = await self._reason_to_do_without(run, leg)
            if reason is None and _is_last_token(leg):
                return Alone(self._owner(run, self._owners(run)))
            seat = await self._first_seat(run, leg, may_be_alone=reason is not None)
            place = self._place(run, leg, seat, reason)
            if place is not None:
                self._note_prefix(leg, seat.worker)
                return place
            seat.release()

    def _place(
        self, run: Run, leg: GenerationRequest, seat: Seat, reason: LocalReason | None
    ) -> Place | None:
        """What the seat is good for now; None: its owners have gone while credit was waited for."""
        if reason is None and self._is_short(run, leg, seat.worker):
            reason = LocalReason.SHORT
        if reason is not None:
            return Local(seat, reason)
        if owners := paired_with(self._owners(run), [seat.worker]):
            return Paired(self._owner(run, owners), seat)
        if self._workers.prefill_workers() and self._may_fall_back(run, leg):
            return Local(seat, LocalReason.NO_PAIR)
        return None

    async def other_seat(
        self, run: Run, leg: GenerationRequest, owner: PrefillWorker, limit_s: float
    ) -> Seat:
        """A seat at a decode worker that has not failed this request, for a ticket that another one had.

        Raises `TimeoutError`.
        """

        def attempt(claimed: Set[WorkerIdentity]) -> Seat | WaitsFor | None:
            alike = paired_with(self._readers(run), [owner])
            others = [worker for worker in alike if worker.identity not in run.failed]
            return self._seat(run, leg, others, claimed)

        seat = await self._workers.credits.reserve(
            _order(leg, is_under_way=True),
            attempt,
            min(limit_s, run.deadline.remaining_s),
            self._observer.waited_for_credit,
        )
        self._observer.reoffered()
        return seat

    async def _first_seat(self, run: Run, leg: GenerationRequest, *, may_be_alone: bool) -> Seat:
        """`may_be_alone`: it is known already that the decode worker computes the prompt."""

        def attempt(claimed: Set[WorkerIdentity]) -> Seat | WaitsFor | None:
            readers = self._readers(run) if may_be_alone else self._useful_readers(run, leg)
            return self._seat(run, leg, readers, claimed)

        if readers := self._readers(run):
            run.current = self._policy.choose(Role.DECODE, readers).identity
        try:
            return await self._workers.credits.reserve(
                _order(leg, is_under_way=run.has_emitted),
                attempt,
                run.deadline.remaining_s,
                self._observer.waited_for_credit,
                patience_s=self._settings.worker_wait_s,
                is_hopeful=lambda: bool(self._useful_readers(run, leg)),
                num_tokens=leg.num_blocks(1),
            )
        except TimeoutError as error:
            raise self._why_no_seat(run, leg, may_be_alone=may_be_alone) from error

    def _useful_readers(self, run: Run, leg: GenerationRequest) -> list[DecodeWorker]:
        """Those that an owner may compute the prompt for; else all, if they may compute it themselves."""
        readers = self._readers(run)
        if not self._workers.prefill_workers():
            return readers  # for how long is not a question of credit: see `find`
        paired = paired_with(readers, self._owners(run))
        return paired if paired or not self._may_fall_back(run, leg) else readers

    def _why_no_seat(self, run: Run, leg: GenerationRequest, *, may_be_alone: bool) -> SplitserveError:
        if self._readers(run) and not (may_be_alone or self._useful_readers(run, leg)):
            return self._unavailable("no prefill worker's KV is of use to a decode worker")
        if not self._readers(run) and run.deadline.remaining_s:
            return self._nobody(run, Role.DECODE)
        return deadline_exceeded()

    def _seat(
        self,
        run: Run,
        leg: GenerationRequest,
        workers: Sequence[DecodeWorker],
        claimed: Set[WorkerIdentity],
    ) -> Seat | WaitsFor | None:
        free = (worker for worker in workers if worker.identity not in claimed)
        able = [worker for worker in free if can_seat(worker, leg)]
        if able:
            return Seat(self._policy.choose(Role.DECODE, _fresh(able, run)), leg)
        waits_for_all = len(workers) == num_usable(self._workers, Role.DECODE)
        return None if waits_for_all else WaitsFor({worker.identity for worker in workers})

    def _readers(self, run: Run) -> list[DecodeWorker]:
        return of_contents(self._workers.decode_workers(), run.contents)

    def _owners(self, run: Run) -> list[PrefillWorker]:
        return of_contents(self._workers.prefill_workers(), run.contents)

    def _owner(self, run: Run, owners: Sequence[PrefillWorker]) -> PrefillWorker:
        return self._policy.choose(Role.PREFILL, _fresh(owners, run))

    def _nobody(self, run: Run, role: Role) -> WorkerUnavailable:
        if num_usable(self._workers, role):
            return self._unavailable(f"no {role.value} worker runs the model that the request began on")
        return self._unavailable(f"no {role.value} worker can take requests now")

    def _unavailable(self, why: str) -> WorkerUnavailable:
        return WorkerUnavailable(why, retry_after_s=self._settings.retry_after_s)

    async def _reason_to_do_without(self, run: Run, leg: GenerationRequest) -> LocalReason | None:
        """Wait until there is a prefill worker, or a reason to do without one."""
        may_fall_back = self._may_fall_back(run, leg)
        if may_fall_back and self._all_have_failed(run):
            return LocalReason.PREFILL_FAILED
        give_up_s = self._clock() + self._settings.worker_wait_s
        while not self._owners(run):
            absent_since = self._workers.prefill_absent_since
            if absent_since is None and may_fall_back:
                return LocalReason.NO_PAIR  # those that are there are of another version
            now = self._clock()
            until = give_up_s
            if absent_since is not None and may_fall_back:
                until = absent_since + self._settings.prefill_grace_s
            if now >= run.deadline.at:
                raise deadline_exceeded()
            if now >= until:
                if may_fall_back:
                    return LocalReason.NO_PREFILL_WORKER
                raise self._nobody(run, Role.PREFILL)
            await self._change_within(min(until - now, run.deadline.remaining_s))
        return None

    async def _change_within(self, limit_s: float) -> None:
        """Return after the next change of the workers, or when the time is up."""
        try:
            async with asyncio.timeout(limit_s):
                await self._workers.changed()
        except TimeoutError:
            return

    def _may_fall_back(self, run: Run, leg: GenerationRequest) -> bool:
        return self._settings.local_prefill_on_failure and _may_be_local(run, leg)

    def _all_have_failed(self, run: Run) -> bool:
        owners = {worker.identity for worker in self._owners(run)}
        return bool(run.failed_owners) and owners <= run.failed_owners

    def _is_short(self, run: Run, leg: GenerationRequest, reader: DecodeWorker) -> bool:
        """Whether the part of the prompt that the reader lacks costs less than a hand-off."""
        limit = self._settings.local_prefill_tokens
        if not limit or not _may_be_local(run, leg):
            return False
        token_ids = leg.prompt_token_ids + leg.output_token_ids
        return len(token_ids) - reader.prefixes.num_known_tokens(token_ids, leg.cache_salt) <= limit

    def _note_prefix(self, leg: GenerationRequest, reader: DecodeWorker) -> None:
        """The reader is going to have it cached, however it comes by it."""
        if self._settings.local_prefill_tokens:  # else nobody asks
            token_ids = leg.prompt_token_ids + leg.output_token_ids
            reader.prefixes.note(token_ids, leg.cache_salt, reader.load.blocks_total)


def _fresh(workers: Sequence[W], run: Run) -> Sequence[W]:
    """Those that have not let the request down; all of them where there are none."""
    return [worker for worker in workers if worker.identity not in run.failed] or workers


def _may_be_local(run: Run, leg: GenerationRequest) -> bool:
    """Decode workers do not score prompts."""
    return not run.needs_handoff and leg.sampling.prompt_logprobs is None


def _is_last_token(leg: GenerationRequest) -> bool:
    return len(leg.output_token_ids) + 1 >= leg.sampling.max_tokens


def _order(leg: GenerationRequest, *, is_under_way: bool) -> Order:
    """A client that has tokens, or whose KV is held, is served before those that have nothing yet."""
    return leg.priority, 0 if is_under_way else 1
