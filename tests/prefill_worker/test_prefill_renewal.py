"""Readers that wait for progress, and what a broken wait tells. Virtual time, scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from prefill_bench import LEASE_S, ScriptedBench
from virtual_time import settle, virtual_time

from engine import PrefillProgressed, ReleaseSequence
from prefill_worker.holder import MAX_RENEW_WAIT_S, ORPHAN_GRACE_S
from protocol.handoff import NOT_HELD, LeaseStatus, Ticket, Verdict
from protocol.ids import SequenceId


async def computing(bench: ScriptedBench) -> tuple[SequenceId, Ticket]:
    """A request whose first four tokens are ready."""
    bench.submit()
    seq_id = bench.added()
    await bench.allocate(seq_id)
    return seq_id, bench.ticket()


async def cut_off(call: asyncio.Task[LeaseStatus]) -> None:
    """Break a reader's call, as gRPC does when the connection is gone."""
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call


@virtual_time
async def test_reader_that_knows_less_is_answered_at_once() -> None:
    bench = ScriptedBench()
    _, ticket = await computing(bench)
    started_s = bench.clock()
    assert (await bench.wait(ticket, tokens_known=0)).tokens_ready == 4
    assert bench.clock() == started_s
    bench.holder.drop_all()
    bench.session.end()
    bench.assert_idle()


@virtual_time
async def test_all_waiting_readers_hear_of_progress_at_once() -> None:
    bench = ScriptedBench()
    seq_id, ticket = await computing(bench)
    calls = [bench.wait(ticket, tokens_known) for tokens_known in (4, 4, 5, 8)]
    await asyncio.sleep(0.5)
    assert not any(call.done() for call in calls)
    await bench.emit(PrefillProgressed(seq_id, 8))
    assert [call.done() for call in calls] == [True, True, True, False]
    assert [call.result().tokens_ready for call in calls[:3]] == [8, 8, 8]
    await bench.finish(seq_id)
    assert calls[3].result() == LeaseStatus(held=True, tokens_ready=10, lease_s=LEASE_S)
    assert await bench.release(ticket) is Verdict.VALID
    bench.assert_idle()


@pytest.mark.parametrize(
    ("wait_s", "waited_s"),
    [
        (0.0, 0.0),
        (-1.0, 0.0),
        (float("nan"), 0.0),
        (1.5, 1.5),
        (1e9, LEASE_S / 3),
        (float("inf"), LEASE_S / 3),
    ],
)
@virtual_time
async def test_wait_is_bounded_and_ends_with_a_renewal(wait_s: float, waited_s: float) -> None:
    assert LEASE_S / 3 < MAX_RENEW_WAIT_S
    bench = ScriptedBench()
    seq_id, ticket = await bench.hold()
    await asyncio.sleep(LEASE_S - 0.1)
    started_s = bench.clock()
    status = await bench.wait(ticket, tokens_known=10, wait_s=wait_s)
    assert status == LeaseStatus(held=True, tokens_ready=10, lease_s=LEASE_S)
    assert bench.clock() - started_s == pytest.approx(waited_s)
    await asyncio.sleep(LEASE_S - 0.1)
    assert bench.engine.take() == []
    await asyncio.sleep(0.2)
    assert bench.engine.take() == [ReleaseSequence(seq_id)]
    bench.assert_idle()


async def by_drop(bench: ScriptedBench, ticket: Ticket) -> None:
    bench.give_up(ticket)


async def by_abort(bench: ScriptedBench, ticket: Ticket) -> None:
    bench.abort()


async def by_release(bench: ScriptedBench, ticket: Ticket) -> None:
    await bench.release(ticket)


async def by_session_end(bench: ScriptedBench, ticket: Ticket) -> None:
    bench.session.end()


@pytest.mark.parametrize("end", [by_drop, by_abort, by_release, by_session_end])
@virtual_time
async def test_waiting_readers_hear_at_once_that_the_ticket_is_lost(
    end: Callable[[ScriptedBench, Ticket], Awaitable[None]],
) -> None:
    bench = ScriptedBench()
    _, ticket = await computing(bench)
    calls = [bench.wait(ticket, tokens_known=4) for _ in range(3)]
    await settle()
    started_s = bench.clock()
    await end(bench, ticket)
    assert await asyncio.gather(*calls) == [NOT_HELD] * 3
    assert bench.clock() == started_s
    bench.assert_idle()


@virtual_time
async def test_lease_cannot_lapse_while_the_prompt_is_computed_and_starts_when_it_is_done() -> None:
    bench = ScriptedBench()
    seq_id, ticket = await computing(bench)
    await asyncio.sleep(20 * LEASE_S)
    assert bench.engine.take() == []
    await bench.finish(seq_id)
    await asyncio.sleep(LEASE_S - 0.1)
    assert bench.engine.take() == []
    await asyncio.sleep(0.2)
    assert bench.engine.take() == [ReleaseSequence(seq_id)]
    assert await bench.release(ticket) is Verdict.EXPIRED
    bench.assert_idle()


@virtual_time
async def test_broken_wait_gives_the_blocks_back_within_the_grace() -> None:
    bench = ScriptedBench()
    seq_id, ticket = await bench.hold()
    call = bench.wait(ticket, tokens_known=10)
    await asyncio.sleep(0.7)
    await cut_off(call)
    await asyncio.sleep(ORPHAN_GRACE_S - 0.01)
    assert bench.engine.take() == []
    await asyncio.sleep(0.02)
    assert bench.engine.take() == [ReleaseSequence(seq_id)]
    assert bench.sample("splitserve_lease_orphaned_total") == 1
    assert await bench.release(ticket) is Verdict.EXPIRED
    bench.assert_idle()


@virtual_time
async def test_another_reader_that_comes_within_the_grace_gets_the_whole_lease() -> None:
    bench = ScriptedBench()
    _, ticket = await bench.hold()
    call = bench.wait(ticket, tokens_known=10)
    await settle()
    await cut_off(call)
    await asyncio.sleep(ORPHAN_GRACE_S - 0.01)
    assert (await bench.renew(ticket)).held
    await asyncio.sleep(LEASE_S - 0.1)
    assert await bench.release(ticket, "b") is Verdict.VALID
    bench.assert_idle()


@virtual_time
async def test_wait_that_breaks_during_the_prefill_costs_nothing() -> None:
    """The router knows of the prefill and offers the ticket to another reader, or drops it."""
    bench = ScriptedBench()
    seq_id, ticket = await computing(bench)
    call = bench.wait(ticket, tokens_known=4)
    await settle()
    await cut_off(call)
    await asyncio.sleep(2 * LEASE_S)
    await bench.finish(seq_id)
    await asyncio.sleep(LEASE_S - 0.1)
    assert bench.sample("splitserve_lease_orphaned_total") == 0
    assert await bench.release(ticket, "b") is Verdict.VALID
    bench.assert_idle()


@virtual_time
async def test_wait_that_breaks_while_another_reader_waits_costs_nothing_until_that_one_breaks() -> None:
    bench = ScriptedBench()
    seq_id, ticket = await bench.hold()
    first, second = (bench.wait(ticket, tokens_known=10) for _ in range(2))
    await settle()
    await cut_off(second)
    assert bench.sample("splitserve_lease_orphaned_total") == 0
    await cut_off(first)
    assert bench.sample("splitserve_lease_orphaned_total") == 1
    await asyncio.sleep(ORPHAN_GRACE_S + 0.01)
    assert bench.engine.take() == [ReleaseSequence(seq_id)]
    bench.assert_idle()


@virtual_time
async def test_time_limit_of_a_wait_that_a_new_renewal_overtook_costs_nothing() -> None:
    """The reader lives: it gave one call up, and its next one was answered before that was known here."""
    bench = ScriptedBench()
    _, ticket = await bench.hold()
    given_up = bench.wait(ticket, tokens_known=10)
    await settle()
    assert (await bench.renew(ticket)).held
    await cut_off(given_up)
    assert bench.sample("splitserve_lease_orphaned_total") == 0
    await asyncio.sleep(LEASE_S - 0.1)
    assert await bench.release(ticket) is Verdict.VALID
    bench.assert_idle()


@virtual_time
async def test_wait_that_is_cut_off_after_the_verdict_changes_nothing() -> None:
    bench = ScriptedBench()
    seq_id, ticket = await bench.hold()
    call = bench.wait(ticket, tokens_known=10)
    await settle()
    assert await bench.release(ticket) is Verdict.VALID
    await cut_off(call)
    assert bench.sample("splitserve_lease_orphaned_total") == 0
    assert await bench.release(ticket) is Verdict.VALID
    assert bench.engine.take() == [ReleaseSequence(seq_id)]
    bench.assert_idle()
