"""How much may this router still hand to a decode worker, and who is next to hand something over?

A decode worker grants blocks on every frame, and says how many submissions that grant accounts for. What
was promised since (to legs whose ticket has not come yet, or whose submission is on its way) is taken off:

    reserve ──> promised ──submitted──> on its way ──a grant that counts it──> accounted for by the worker
       └────────────┴───────────────────────┴───────────release──────────────────────┴──> gone
"""

from __future__ import annotations

import asyncio
import itertools
import math
from bisect import insort
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Protocol, TypeVar

from protocol.errors import SplitserveError
from protocol.handoff import Credit
from protocol.ids import WorkerIdentity
from protocol.ports import Clock

MAX_OVERTAKEN = 64
"""Callers that are looked past for one that could be served: trying them all takes time on every frame."""


class Reservation:
    """Blocks of one decode worker that one submission may take. Has one owner, who releases it."""

    def __init__(self, account: CreditAccount, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.submission: int | None = None
        """Its number on the stream, once it was submitted."""
        self._account: CreditAccount | None = account

    def release(self) -> None:
        """Give back what was promised. Idempotent."""
        account, self._account = self._account, None
        if account is not None:
            account.released(self)


class CreditAccount:
    """One decode worker's credit, by the frames of one stream after another."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        """`on_change` is told that more may be available now."""
        self._on_change = on_change
        self._granted = Credit(0, 0)
        self._num_submissions = 0
        self._live: set[Reservation] = set()
        self._unaccounted: set[Reservation] = set()
        """Those of the living ones that the grant does not know of."""

    @property
    def num_available(self) -> int:
        """Blocks; negative when the worker has less than was promised."""
        return self._granted.blocks - sum(reservation.num_blocks for reservation in self._unaccounted)

    def covers(self, num_blocks: int, *, is_idle: bool) -> bool:
        """Whether a reservation of so many blocks is backed.

        A worker that is idle, and to which nothing is promised, takes any request: what does not fit
        then never will, and the worker says so.
        """
        return num_blocks <= self.num_available or (is_idle and not self._live)

    def reserve(self, num_blocks: int) -> Reservation:
        """Promise blocks, whether or not they are covered."""
        reservation = Reservation(self, num_blocks)
        self._live.add(reservation)
        self._unaccounted.add(reservation)
        return reservation

    def submitted(self, reservation: Reservation) -> None:
        """The reservation's request leaves now, on the present stream."""
        self._num_submissions += 1
        reservation.submission = self._num_submissions

    def granted(self, credit: Credit) -> None:
        """The worker said this on the present stream."""
        self._granted = credit
        self._unaccounted = {
            reservation
            for reservation in self._unaccounted
            if reservation.submission is None or reservation.submission > credit.num_submissions
        }
        self._on_change()

    def released(self, reservation: Reservation) -> None:
        self._live.discard(reservation)
        self._unaccounted.discard(reservation)
        self._on_change()

    def reset(self) -> None:
        """The stream is gone: the next one counts anew, and the worker drops what came on this one."""
        self._granted = Credit(0, 0)
        self._num_submissions = 0
        self._unaccounted = {r for r in self._unaccounted if r.submission is None}

    def assert_idle(self) -> None:
        """Nothing is promised to anybody."""
        assert not self._live, f"{len(self._live)} reservations were not released"  # noqa: S101


class Releasable(Protocol):
    def release(self) -> None:
        """Give it back. Idempotent."""


R = TypeVar("R", bound=Releasable)

Order = tuple[int, ...]
"""Smaller comes first; equal ones in the order of their arrival."""


@dataclass(frozen=True, slots=True)
class WaitsFor:
    """None of these workers has credit for the caller yet: those behind it get nothing of theirs."""

    workers: Set[WorkerIdentity]


Attempt = Callable[[Set[WorkerIdentity]], R | WaitsFor | None]
"""Tries to get something of a worker that is not among the given ones: others wait for those already.

None: nothing, and the caller waits for whatever worker there is. Must neither raise nor block.
"""


class CreditQueue:
    """Those who wait for the credit of decode workers. A worker's goes to the first that can use it.

    So a request of many blocks is not overtaken for ever by small ones, and one that only few workers
    may take does not hold up others.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: list[tuple[Order, int, _Waiter]] = []
        """Sorted."""
        self._stranded: list[tuple[Order, int, _Waiter]] = []
        """Those that can use none of the workers that there are: no credit helps them."""
        self._arrivals = itertools.count()
        self._closed_by: SplitserveError | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._stranded)

    @property
    def num_waiting_tokens(self) -> int:
        """What those that wait want to keep at a decode worker."""
        return sum(entry[2].num_tokens for entry in (*self._waiting, *self._stranded))

    async def reserve(
        self,
        order: Order,
        attempt: Attempt[R],
        timeout_s: float,
        on_waited: Callable[[float], None] = lambda seconds: None,
        *,
        patience_s: float = math.inf,
        is_hopeful: Callable[[], bool] = lambda: True,
        num_tokens: int = 0,
    ) -> R:
        """What `attempt` returns as soon as it is this caller's turn and it returns something.

        It is tried again on `wake` and on `workers_changed`. `on_waited` gets the seconds of one that did
        not come through at once. Raises `TimeoutError`, before its time when a look, one every
        `patience_s`, shows that there is no hope, and what the queue was closed with. `num_tokens` is only
        counted, as long as it waits.
        """
        if self._closed_by is not None:
            raise self._closed_by
        granted: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        entry = (order, next(self._arrivals), _Waiter(attempt, granted, num_tokens))
        insort(self._waiting, entry)
        self.wake()
        if granted.done():
            return granted.result()
        since = self._clock()
        try:
            await self._wait(granted, since + timeout_s, patience_s, is_hopeful)
            return granted.result()
        except BaseException:
            self._withdraw(entry)
            raise
        finally:
            on_waited(self._clock() - since)

    async def _wait(
        self,
        granted: asyncio.Future[R],
        give_up_s: float,
        patience_s: float,
        is_hopeful: Callable[[], bool],
    ) -> None:
        while not granted.done():
            left_s = give_up_s - self._clock()
            await asyncio.wait([granted], timeout=min(left_s, patience_s))
            if not granted.done() and (left_s <= patience_s or not is_hopeful()):
                raise TimeoutError

    def wake(self) -> None:
        """Credit may have become free. Cheap when nobody waits."""
        claimed: set[WorkerIdentity] = set()
        num_overtaken = 0
        while num_overtaken < min(len(self._waiting), MAX_OVERTAKEN):
            waiter = self._waiting[num_overtaken][2]
            if waiter.is_served(claimed):
                del self._waiting[num_overtaken]
            elif waiter.waits_for is None:
                return
            elif not waiter.waits_for.workers:
                self._stranded.append(self._waiting.pop(num_overtaken))
            else:
                claimed |= waiter.waits_for.workers
                num_overtaken += 1

    def workers_changed(self) -> None:
        """Others are usable now."""
        stranded, self._stranded = self._stranded, []
        self._waiting = sorted(self._waiting + stranded)
        self.wake()

    def _withdraw(self, entry: tuple[Order, int, _Waiter]) -> None:
        """Leave the queue; what was granted at the same moment is given back."""
        if entry in self._stranded:
            self._stranded.remove(entry)
        elif entry in self._waiting:
            self._waiting.remove(entry)
            self.wake()  # the one behind may be content with less
        else:
            entry[2].give_back()

    def open(self) -> None:
        """Let callers wait (again)."""
        self._closed_by = None

    def close(self, error: SplitserveError) -> None:
        """All that wait, and all that come, get `error`."""
        self._closed_by = error
        waiting, self._waiting, self._stranded = self._waiting + self._stranded, [], []
        for _, _, waiter in waiting:
            waiter.fail(error)

    def assert_idle(self) -> None:
        assert not self.num_waiting, f"{self.num_waiting} still wait for credit"  # noqa: S101


class _Waiter:
    """One caller of `reserve`. Its types are erased: a queue serves callers of any."""

    def __init__(self, attempt: Attempt[R], granted: asyncio.Future[R], num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.waits_for: WaitsFor | None = None
        """As of the last try."""
        self._attempt: Attempt[Releasable] = attempt
        self._granted: asyncio.Future[Releasable] = granted  # type: ignore[assignment]  # invariant

    def is_served(self, claimed: Set[WorkerIdentity]) -> bool:
        """Whether the caller is done with waiting, by this try at the latest."""
        if self._granted.done():  # its task is being cancelled, and has not run yet
            return True
        found = self._attempt(claimed)
        if found is None or isinstance(found, WaitsFor):
            self.waits_for = found
            return False
        self._granted.set_result(found)
        return True

    def fail(self, error: SplitserveError) -> None:
        if not self._granted.done():
            self._granted.set_exception(error)

    def give_back(self) -> None:
        granted = self._granted
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            granted.result().release()
