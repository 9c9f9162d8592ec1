"""Credit: what is available after grants and promises that cross, and who gets it first."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import settle, virtual_time

from protocol.errors import WorkerUnavailable
from protocol.handoff import Credit
from protocol.ids import WorkerId, WorkerIdentity
from router.credit import MAX_OVERTAKEN, Attempt, CreditAccount, CreditQueue, Order, Reservation, WaitsFor


def test_promises_count_until_a_grant_accounts_for_them() -> None:
    account = CreditAccount()
    account.granted(Credit(10, 0))
    early, late = account.reserve(3), account.reserve(2)
    assert account.num_available == 5
    account.submitted(late)  # the ticket of the other one takes longer
    account.granted(Credit(8, 1))
    assert account.num_available == 5
    account.submitted(early)
    account.granted(Credit(8, 1))  # left the worker before the second submission came
    assert account.num_available == 5
    account.granted(Credit(5, 2))
    assert account.num_available == 5
    early.release()
    early.release()
    late.release()
    assert account.num_available == 5  # the next grant tells what that has freed
    account.assert_idle()


def test_promise_that_is_withdrawn_is_available_at_once() -> None:
    changes: list[None] = []
    account = CreditAccount(lambda: changes.append(None))
    account.granted(Credit(4, 0))
    reservation = account.reserve(4)
    assert not account.covers(1, is_idle=False)
    reservation.release()
    assert account.covers(4, is_idle=False)
    assert len(changes) == 2


def test_idle_worker_takes_one_request_of_any_size() -> None:
    account = CreditAccount()
    account.granted(Credit(4, 0))
    assert account.covers(5, is_idle=True)
    assert not account.covers(5, is_idle=False)
    reservation = account.reserve(5)
    assert not account.covers(1, is_idle=True)
    account.submitted(reservation)
    account.granted(Credit(4, 1))
    assert not account.covers(5, is_idle=True)  # the worker's load may lag: something is promised to it
    reservation.release()
    assert account.covers(5, is_idle=True)


def test_new_stream_counts_anew() -> None:
    account = CreditAccount()
    account.granted(Credit(9, 0))
    sent, waiting = account.reserve(2), account.reserve(3)
    account.submitted(sent)
    account.reset()
    assert account.num_available == -3
    account.granted(Credit(9, 0))
    assert account.num_available == 6
    account.submitted(waiting)
    account.granted(Credit(6, 1))
    assert account.num_available == 6
    with pytest.raises(AssertionError, match="2 reservations"):
        account.assert_idle()


Step = tuple[str, int]


@given(
    st.lists(st.tuples(st.sampled_from(["reserve", "submit", "frame", "end", "break"]), st.integers(0, 9)))
)
def test_covered_promises_never_exceed_what_the_worker_has(steps: list[Step]) -> None:
    """A model of the worker: its frames arrive late, in order, and account for what it has seen."""
    num_blocks = 12
    account = CreditAccount()
    held: list[Reservation] = []
    at_worker: list[Reservation] = []
    num_seen = 0
    account.granted(Credit(num_blocks, 0))
    for kind, number in steps:
        waiting = [r for r in held if r not in at_worker]
        if kind == "reserve" and account.covers(number, is_idle=False):
            held.append(account.reserve(number))
        elif kind == "submit" and waiting:
            account.submitted(waiting[0])
            at_worker.append(waiting[0])
            num_seen += 1
        elif kind == "frame":
            free = num_blocks - sum(r.num_blocks for r in at_worker)
            account.granted(Credit(free, num_seen))
        elif kind == "end" and held:
            reservation = held.pop(number % len(held))
            reservation.release()
            at_worker = [r for r in at_worker if r is not reservation]
        elif kind == "break":
            account.reset()
            for reservation in [r for r in held if r.submission is not None]:
                reservation.release()  # their legs fail
                held.remove(reservation)
            at_worker, num_seen = [], 0
            account.granted(Credit(num_blocks, 0))
        assert sum(r.num_blocks for r in held) <= num_blocks
    for reservation in held:
        reservation.release()
    account.assert_idle()


@dataclass
class Grant:
    """Something with blocks of a purse."""

    purse: Purse
    num_blocks: int

    def release(self) -> None:
        self.purse.num_blocks += self.num_blocks
        self.num_blocks = 0
        self.purse.queue.wake()


@dataclass
class Purse:
    """What all wait for."""

    queue: CreditQueue
    num_blocks: int = 0
    served: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def ask(
        self, name: str, num_blocks: int, order: Order = (0, 1), timeout_s: float = 100.0
    ) -> asyncio.Task[Grant]:
        async def wait() -> Grant:
            return await self.queue.reserve(
                order, self._attempt(name, num_blocks), timeout_s, self.waits.append
            )

        return asyncio.create_task(wait())

    def _attempt(self, name: str, num_blocks: int) -> Attempt[Grant]:
        def attempt(claimed: Set[WorkerIdentity]) -> Grant | None:
            if self.num_blocks < num_blocks:
                return None
            self.num_blocks -= num_blocks
            self.served.append(name)
            return Grant(self, num_blocks)

        return attempt

    def put(self, num_blocks: int) -> None:
        self.num_blocks += num_blocks
        self.queue.wake()


def new_purse(num_blocks: int = 0) -> Purse:
    return Purse(CreditQueue(asyncio.get_running_loop().time), num_blocks)


@virtual_time
async def test_who_finds_credit_does_not_wait() -> None:
    purse = new_purse(3)
    await purse.ask("one", 3)
    assert purse.waits == []


@virtual_time
async def test_large_request_is_not_overtaken_by_small_ones() -> None:
    purse = new_purse(1)
    tasks = [purse.ask("large", 5), purse.ask("small", 1), purse.ask("late", 1)]
    await settle()
    assert purse.served == []
    await asyncio.sleep(2.0)
    purse.put(5)
    await settle()
    assert purse.served == ["large", "small"]
    purse.put(1)
    await asyncio.gather(*tasks)
    assert purse.served == ["large", "small", "late"]
    assert purse.waits == [2.0] * 3
    purse.queue.assert_idle()


@virtual_time
async def test_order_goes_before_arrival() -> None:
    purse = new_purse()
    tasks = [
        purse.ask("new", 1, (0, 1)),
        purse.ask("resumed", 1, (0, 0)),
        purse.ask("canary", 1, (-9, 1)),
    ]
    await settle()
    purse.put(3)
    await asyncio.gather(*tasks)
    assert purse.served == ["canary", "resumed", "new"]


@virtual_time
async def test_what_waits_is_counted_in_tokens_as_long_as_it_waits() -> None:
    queue = CreditQueue(asyncio.get_running_loop().time)
    waiting = [
        asyncio.create_task(
            queue.reserve((0, 1), lambda claimed: None, seconds, num_tokens=num_tokens)  # type: ignore[arg-type]
        )
        for seconds, num_tokens in ((1.0, 100), (5.0, 30))
    ]
    await settle()
    assert queue.num_waiting_tokens == 130
    await asyncio.wait(waiting[:1])
    assert queue.num_waiting_tokens == 30
    await asyncio.wait(waiting)
    assert queue.num_waiting_tokens == 0
    assert all(isinstance(task.exception(), TimeoutError) for task in waiting)


@virtual_time
async def test_wait_is_bounded_and_lets_the_next_one_through() -> None:
    purse = new_purse(1)
    large, small = purse.ask("large", 5, timeout_s=3.0), purse.ask("small", 1)
    with pytest.raises(TimeoutError):
        await large
    await small
    assert purse.served == ["small"]
    purse.queue.assert_idle()


@pytest.mark.parametrize("grant_first", [True, False])
def test_credit_is_not_lost_when_grant_and_cancellation_cross(grant_first: bool) -> None:
    @virtual_time
    async def scenario() -> None:
        purse = new_purse()
        leaving, staying = purse.ask("leaving", 1), purse.ask("staying", 1)
        await settle()
        if grant_first:
            purse.put(1)
            leaving.cancel()
        else:
            leaving.cancel()
            purse.put(1)
        await staying
        assert leaving.cancelled()
        assert purse.num_blocks == 0
        purse.queue.assert_idle()

    scenario()


@virtual_time
async def test_closed_queue_lets_nobody_wait() -> None:
    purse = new_purse()
    waiting = purse.ask("waiting", 1)
    await settle()
    purse.queue.close(WorkerUnavailable("stopped"))
    for task in (waiting, purse.ask("late", 1)):
        with pytest.raises(WorkerUnavailable, match="stopped"):
            await task
    purse.queue.open()
    purse.put(1)
    await purse.ask("again", 1)
    purse.queue.assert_idle()


def ask_of(
    queue: CreditQueue, free: dict[str, int], workers: str, timeout_s: float = 100.0
) -> asyncio.Task[Grant]:
    """Wait for one block of one of some workers, each of which is a letter."""

    def attempt(claimed: Set[WorkerIdentity]) -> Grant | WaitsFor:
        wanted = {WorkerIdentity(WorkerId(worker), "1") for worker in workers if worker in free}
        for worker in sorted(wanted - claimed, key=str):
            if free.get(worker.worker_id, 0):
                free[worker.worker_id] -= 1
                return Grant(Purse(queue), 1)
        return WaitsFor(wanted)

    return asyncio.create_task(queue.reserve((0, 1), attempt, timeout_s))


@virtual_time
async def test_those_behind_get_what_nobody_before_them_waits_for() -> None:
    queue, free = CreditQueue(asyncio.get_running_loop().time), {"a": 0, "b": 1}
    first, second, third = (ask_of(queue, free, workers) for workers in ("a", "a", "ab"))
    await third
    assert not first.done()
    last = ask_of(queue, free, "ab")
    free["a"] = 1
    queue.wake()
    await first
    assert not second.done()
    free["a"] = 2
    queue.wake()
    await asyncio.gather(second, last)
    queue.assert_idle()


@virtual_time
async def test_only_so_many_are_overtaken() -> None:
    queue, free = CreditQueue(asyncio.get_running_loop().time), {"a": 0, "b": 1}
    ahead = [ask_of(queue, free, "a", timeout_s=9.0) for _ in range(MAX_OVERTAKEN)]
    last = ask_of(queue, free, "b")
    await settle()
    assert not last.done()
    await asyncio.wait(ahead)
    await last
    assert all(isinstance(task.exception(), TimeoutError) for task in ahead)
    queue.assert_idle()


@virtual_time
async def test_any_number_of_those_who_can_use_no_worker_is_overtaken() -> None:
    queue, free = CreditQueue(asyncio.get_running_loop().time), {"b": 1}
    stranded = [ask_of(queue, free, "a") for _ in range(3 * MAX_OVERTAKEN)]
    leaving = ask_of(queue, free, "a", timeout_s=1.0)
    await ask_of(queue, free, "b")
    with pytest.raises(TimeoutError):
        await leaving
    assert queue.num_waiting == len(stranded)
    free["a"] = 2
    queue.workers_changed()
    await asyncio.gather(*stranded[:2])
    assert queue.num_waiting == len(stranded) - 2
    queue.close(WorkerUnavailable("stopped"))
    await asyncio.wait(stranded)
    queue.assert_idle()
