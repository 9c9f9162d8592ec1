"""Which workers does a leg get? Waits until there are some, and until one of them has credit.

A decode worker's credit comes first: no prompt is computed whose KV nobody could take over. Every wait
is bounded by the request's deadline and by `worker_wait_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from protocol.errors import Overloaded, SplitserveError, WorkerUnavailable
from protocol.generation import GenerationRequest
from protocol.handoff import Fingerprint
from protocol.ids import Role
from protocol.ports import Clock
from router.credit import Order
from router.deadline import deadline_exceeded
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

Kind = tuple[str, str, int]


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

        Raises `WorkerUnavailable`, `Overloaded` when no decode worker has credit in time, and
        `DeadlineExceeded`.
        """
        leg = run.leg()
        while True:
            reason = await self._reason_to_do_without(run, leg)
            if reason is None and _is_last_token(leg):
                return Alone(self._owner(run))
            seat = await self._first_seat(run, leg, has_owner=reason is None)
            if reason is None and self._is_short(run, leg, seat.worker):
                reason = LocalReason.SHORT
            self._note_prefix(leg, seat.worker)
            if reason is not None:
                return Local(seat, reason)
            if self._workers.prefill_workers():
                return Paired(self._owner(run, seat.worker), seat)
            seat.release()  # they have gone while credit was waited for

    async def other_seat(
        self, run: Run, leg: GenerationRequest, owner: PrefillWorker, limit_s: float
    ) -> Seat:
        """A seat at a decode worker that has not failed this request, for a ticket that another one had.

        Raises `TimeoutError`.
        """

        def attempt() -> Seat | None:
            kind = kind_of(owner.fingerprint)
            workers = self._workers.decode_workers()
            alike = [worker for worker in workers if kind_of(worker.fingerprint) == kind]
            return self._seat(leg, [worker for worker in alike if worker.identity not in run.failed])

        seat = await self._workers.credits.reserve(
            _order(leg, is_under_way=True),
            attempt,
            min(limit_s, run.deadline.remaining_s),
            self._observer.waited_for_credit,
        )
        self._observer.reoffered()
        return seat

    async def _first_seat(self, run: Run, leg: GenerationRequest, *, has_owner: bool) -> Seat:
        def attempt() -> Seat | None:
            workers = self._workers.decode_workers()
            owners = self._workers.prefill_workers() if has_owner else ()
            return self._seat(leg, _fresh(_alike(workers, _kinds(owners)), run))

        if workers := self._workers.decode_workers():
            run.current = self._policy.choose(Role.DECODE, workers).identity
        give_up_s = min(self._settings.worker_wait_s, run.deadline.remaining_s)
        try:
            return await self._workers.credits.reserve(
                _order(leg, is_under_way=run.has_emitted),
                attempt,
                give_up_s,
                self._observer.waited_for_credit,
            )
        except TimeoutError as error:
            raise self._why_no_seat(run) from error

    def _why_no_seat(self, run: Run) -> SplitserveError:
        if not run.deadline.remaining_s:
            return deadline_exceeded()
        if not num_usable(self._workers, Role.DECODE):
            return self._nobody(Role.DECODE)
        return Overloaded(
            "no decode worker has room for the request",
            code="rate_limit_exceeded",
            retry_after_s=self._settings.retry_after_s,
        )

    def _seat(self, leg: GenerationRequest, workers: Sequence[DecodeWorker]) -> Seat | None:
        able = [worker for worker in workers if can_seat(worker, leg)]
        return Seat(self._policy.choose(Role.DECODE, able), leg) if able else None

    def _owner(self, run: Run, reader: DecodeWorker | None = None) -> PrefillWorker:
        """A prefill worker, of the reader's own kind if there is one: versions mix in a rolling update."""
        workers = self._workers.prefill_workers()
        alike = _alike(workers, _kinds([reader])) if reader else workers
        return self._policy.choose(Role.PREFILL, _fresh(alike, run))

    def _nobody(self, role: Role) -> WorkerUnavailable:
        return WorkerUnavailable(
            f"no {role.value} worker can take requests now", retry_after_s=self._settings.retry_after_s
        )

    async def _reason_to_do_without(self, run: Run, leg: GenerationRequest) -> LocalReason | None:
        """Wait until there is a prefill worker, or a reason to do without one."""
        may_fall_back = self._may_fall_back(run, leg)
        if may_fall_back and self._all_have_failed(run):
            return LocalReason.PREFILL_FAILED
        give_up_s = self._clock() + self._settings.worker_wait_s
        while (absent_since := self._workers.prefill_absent_since) is not None:
            now = self._clock()
            until = absent_since + self._settings.prefill_grace_s if may_fall_back else give_up_s
            if now >= run.deadline.at:
                raise deadline_exceeded()
            if now >= until:
                if may_fall_back:
                    return LocalReason.NO_PREFILL_WORKER
                raise self._nobody(Role.PREFILL)
            await self._change_within(min(until - now, run.deadline.remaining_s))
        return LocalReason.NO_PAIR if may_fall_back and not self._has_pair() else None

    def _has_pair(self) -> bool:
        """Whether there may be a prefill worker whose KV is of use to a decode worker."""
        readers = _kinds(self._workers.decode_workers())
        return not readers or not readers.isdisjoint(_kinds(self._workers.prefill_workers()))

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
        owners = {worker.identity for worker in self._workers.prefill_workers()}
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


def kind_of(fingerprint: Fingerprint) -> Kind:
    """What must be alike for the KV of one worker to be of use to another. Layouts are converted."""
    return fingerprint.model, fingerprint.revision, fingerprint.wire_version


def _kinds(workers: Iterable[Worker]) -> set[Kind]:
    return {kind_of(worker.fingerprint) for worker in workers}


def _alike(workers: Sequence[W], kinds: Collection[Kind]) -> Sequence[W]:
    """Those of one of the kinds; all of them where there are none: their answer says what is wrong."""
    return [worker for worker in workers if kind_of(worker.fingerprint) in kinds] or workers


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
