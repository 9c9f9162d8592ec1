"""Who frees what at the prefill worker: every state of a request against everything that may end it.

A real engine on a fake device is stepped by hand, in virtual time: ten tokens are three steps. Each test
ends with no request, no ticket and no block in use.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from prefill_bench import LEASE_S, OnEvents, PrefillBench, SteppedEngine
from virtual_time import settle, virtual_time
from worker_fakes import make_request

from engine import InvalidateCache
from prefill_worker.holder import ORPHAN_GRACE_S
from protocol.codec import failure_from_wire, ticket_from_wire
from protocol.errors import EngineFault, LeaseExpired, SplitserveError, WorkerUnavailable
from protocol.handoff import LeaseStatus, Ticket, Verdict
from protocol.ids import SequenceId

SMALL_POOL = 7
"""Blocks: enough for one request."""


class Bench(PrefillBench[SteppedEngine]):
    """A worker with one request, `r`, in some state."""

    def __init__(self, num_blocks: int = 32) -> None:
        def make_engine(on_events: OnEvents) -> SteppedEngine:
            return SteppedEngine(on_events, num_blocks)

        super().__init__(make_engine)
        self.tickets: dict[str, Ticket] = {}
        self.num_done = 0
        self.failures: list[SplitserveError] = []

    async def step(self, num_steps: int = 1) -> None:
        await self.engine.step(num_steps)
        self.listen()

    def listen(self) -> None:
        """Note what the router is told."""
        frame = self.frame()
        for issued in frame.tickets:
            self.tickets[issued.request_id] = ticket_from_wire(issued.ticket)
        self.num_done += len(frame.done)
        self.failures += map(failure_from_wire, frame.failures)

    @property
    def the_ticket(self) -> Ticket:
        return self.tickets["r"]

    def blocks_in_use(self) -> int:
        stats = self.engine.core.stats()
        return stats.blocks_total - stats.blocks_free


@pytest.fixture(params=["queued", "running", "held"])
def state(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["running", "held"])
def state_with_ticket(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def bench_in(state: str) -> Bench:
    """queued: behind another request that has all blocks. running: the first of three chunks is done."""
    bench = Bench(SMALL_POOL if state == "queued" else 32)
    if state == "queued":
        bench.submit(make_request("other", num_prompt=18))
        await bench.step()
    bench.submit()
    await bench.step({"queued": 1, "running": 1, "held": 3}[state])
    assert ("r" in bench.tickets) == (state != "queued")
    assert bench.num_done == (state == "held")
    return bench


async def cut_off(call: asyncio.Task[LeaseStatus]) -> None:
    """Break a reader's call, as gRPC does when the reader has died."""
    await settle()
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call


@virtual_time
async def test_client_abort_frees_the_blocks_before_the_next_step(state: str) -> None:
    bench = await bench_in(state)
    bench.abort("other")
    bench.abort()
    bench.engine.core.assert_idle()
    if state != "queued":
        assert await bench.release(bench.the_ticket) is Verdict.EXPIRED
    await bench.step(3)
    assert bench.num_done == (state == "held")
    bench.assert_idle()


@virtual_time
async def test_client_abort_is_heard_by_a_waiting_reader_at_once(state_with_ticket: str) -> None:
    bench = await bench_in(state_with_ticket)
    call = bench.wait(bench.the_ticket, tokens_known=10)
    await settle()
    started_s = bench.clock()
    bench.abort()
    assert not (await call).held
    assert bench.clock() == started_s
    bench.assert_idle()


@virtual_time
async def test_ticket_that_the_router_offers_to_nobody_frees_the_blocks(state_with_ticket: str) -> None:
    bench = await bench_in(state_with_ticket)
    bench.give_up(bench.the_ticket)
    bench.engine.core.assert_idle()
    await bench.step(3)
    assert not bench.failures
    bench.assert_idle()


@virtual_time
async def test_dead_reader_is_replaced_by_another_that_gets_everything(state_with_ticket: str) -> None:
    """And the dead one, should it come back, gets nothing."""
    bench = await bench_in(state_with_ticket)
    ticket = bench.the_ticket
    call = bench.wait(ticket, tokens_known=10)
    await cut_off(call)
    await asyncio.sleep(ORPHAN_GRACE_S / 2)
    second = bench.wait(ticket, tokens_known=0)
    assert (await second).held
    await bench.step(0 if state_with_ticket == "held" else 2)
    assert (await bench.renew(ticket)).tokens_ready == 10
    await asyncio.sleep(LEASE_S - 0.1)
    assert await bench.release(ticket, "second") is Verdict.VALID
    assert await bench.release(ticket, "first") is Verdict.EXPIRED
    bench.assert_idle()


@virtual_time
async def test_reader_that_dies_before_the_prefill_is_done_does_not_end_it() -> None:
    bench = await bench_in("running")
    call = bench.wait(bench.the_ticket, tokens_known=10)
    await cut_off(call)
    await asyncio.sleep(3 * LEASE_S)
    await bench.step(2)
    assert bench.num_done == 1
    assert await bench.release(bench.the_ticket, "second") is Verdict.VALID
    bench.assert_idle()


@virtual_time
async def test_reader_that_dies_with_nobody_after_it_costs_the_grace_and_no_more() -> None:
    bench = await bench_in("held")
    call = bench.wait(bench.the_ticket, tokens_known=10)
    await cut_off(call)
    await asyncio.sleep(ORPHAN_GRACE_S - 0.01)
    assert bench.blocks_in_use() == 3
    await asyncio.sleep(0.02)
    assert bench.blocks_in_use() == 0
    bench.assert_idle()


@virtual_time
async def test_reader_that_dies_without_a_sign_costs_the_lease() -> None:
    bench = await bench_in("held")
    assert (await bench.renew(bench.the_ticket)).held
    await asyncio.sleep(LEASE_S + 0.01)
    assert await bench.release(bench.the_ticket) is Verdict.EXPIRED
    bench.assert_idle()


@virtual_time
async def test_reader_without_a_place_gives_the_blocks_back(state_with_ticket: str) -> None:
    """The decode worker dropped the request while it was queued there."""
    bench = await bench_in(state_with_ticket)
    verdict = await bench.release(bench.the_ticket)
    bench.engine.core.assert_idle()
    await bench.step(3)
    is_done = state_with_ticket == "held"
    assert verdict is (Verdict.VALID if is_done else Verdict.EXPIRED)
    assert [type(error) for error in bench.failures] == ([] if is_done else [LeaseExpired])
    bench.assert_idle()


@virtual_time
async def test_session_end_frees_what_is_queued_or_running() -> None:
    for state in ("queued", "running"):
        bench = await bench_in(state)
        call = bench.wait(next(iter(bench.tickets.values())), tokens_known=20)
        await settle()
        bench.session.end()
        bench.engine.core.assert_idle()
        assert not (await call).held
        await bench.step(3)
        assert bench.num_done == 0
        bench.assert_idle()


@virtual_time
async def test_session_end_leaves_a_complete_ticket_to_its_reader() -> None:
    bench = await bench_in("held")
    bench.session.end()
    for _ in range(3):
        await asyncio.sleep(LEASE_S - 0.1)
        assert (await bench.renew(bench.the_ticket)).held
    assert await bench.release(bench.the_ticket) is Verdict.VALID
    bench.assert_idle()


@virtual_time
async def test_session_end_leaves_a_complete_ticket_without_reader_to_its_lease() -> None:
    bench = await bench_in("held")
    bench.session.end()
    await asyncio.sleep(LEASE_S - 0.01)
    assert bench.blocks_in_use() == 3
    await asyncio.sleep(0.02)
    bench.assert_idle()


@virtual_time
async def test_deadline_frees_what_is_queued_or_running() -> None:
    for num_steps, num_tickets in ((0, 0), (2, 1)):
        bench = Bench()
        bench.submit(make_request(deadline_s=2.0))
        await bench.step(num_steps)
        assert len(bench.tickets) == num_tickets
        await asyncio.sleep(2.1)
        bench.engine.core.assert_idle()
        bench.assert_idle()


@virtual_time
async def test_engine_that_breaks_voids_every_ticket_and_fails_every_request(state: str) -> None:
    """What a broken engine still holds dies with it; readers must not take it for valid."""
    bench = await bench_in(state)
    fault = EngineFault("the device is gone")
    bench.session.fail_all(fault)  # as the worker does
    bench.holder.drop_all()
    bench.listen()
    assert [type(e) for e in bench.failures] == [EngineFault] * {"queued": 2, "running": 1}.get(state, 0)
    for ticket in bench.tickets.values():
        assert not (await bench.renew(ticket)).held
        assert await bench.release(ticket) is Verdict.EXPIRED
    bench.assert_idle()


@virtual_time
async def test_cache_reset_starts_a_running_prefill_over_elsewhere() -> None:
    """The engine restarts it in other blocks; its ticket names the old ones, and so another leg is due."""
    bench = await bench_in("running")
    call = bench.wait(bench.the_ticket, tokens_known=10)
    await settle()
    bench.link.post(InvalidateCache(SequenceId("reset")))
    await bench.step()
    assert not (await call).held
    assert [type(error) for error in bench.failures] == [WorkerUnavailable]
    await bench.step(3)
    assert bench.num_done == 0
    bench.assert_idle()
    bench.submit()
    await bench.step(3)
    assert bench.num_done == 1
    assert await bench.release(bench.the_ticket) is Verdict.VALID
    bench.assert_idle()


@virtual_time
async def test_cached_prefix_is_readable_from_the_start() -> None:
    bench = await bench_in("held")
    assert await bench.release(bench.the_ticket) is Verdict.VALID
    bench.submit()
    await bench.step(0)
    bench.listen()
    await bench.step()
    assert bench.the_ticket.tokens_ready == 8
    assert await bench.release(bench.the_ticket) is Verdict.VALID
    bench.assert_idle()


@virtual_time
async def test_reader_follows_the_prefill_step_by_step() -> None:
    bench = Bench()
    bench.submit()
    await bench.step(0)
    known = 0
    seen = []
    for _ in range(3):
        await bench.step()
        known = (await bench.wait(bench.the_ticket, known)).tokens_ready
        seen.append(known)
    assert seen == [4, 8, 10]
    assert bench.num_done == 1
    assert await bench.release(bench.the_ticket) is Verdict.VALID
    bench.assert_idle()
