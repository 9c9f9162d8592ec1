"""The owner's verdict: for one reader, with checksums where asked for. Scripted engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from prefill_bench import LEASE_S, ScriptedBench
from virtual_time import virtual_time

from engine import PrefillProgressed, ReleaseSequence
from prefill_worker.checksums import Checksums
from prefill_worker.holder import ORPHAN_GRACE_S
from protocol.errors import InvalidRequest, LayoutMismatch
from protocol.handoff import Released, Verdict
from protocol.ids import BlockId, TicketId

LIMIT_S = 10.0
"""Of waits that never take so long."""


class Inspector:
    """Computes checksums when the test lets it."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()
        self.asked_for: list[Sequence[BlockId]] = []

    def __call__(self, block_ids: Sequence[BlockId]) -> list[int]:
        self.asked_for.append(block_ids)
        self.is_asked.set()
        assert self.may_answer.wait(LIMIT_S)
        return [100 + block_id for block_id in block_ids]

    async def until_asked(self) -> None:
        assert await asyncio.to_thread(self.is_asked.wait, LIMIT_S)


@virtual_time
async def test_ticket_is_valid_for_its_first_reader_alone() -> None:
    bench = ScriptedBench()
    seq_id, ticket = await bench.hold()
    assert [await bench.release(ticket, reader) for reader in ("a", "b", "a")] == [
        Verdict.VALID,
        Verdict.EXPIRED,
        Verdict.VALID,
    ]
    assert bench.sample("splitserve_readers_fenced_total") == 1
    assert bench.engine.take() == [ReleaseSequence(seq_id)]
    bench.assert_idle()


@virtual_time
async def test_release_that_names_no_reader_is_refused_and_the_ticket_stays() -> None:
    bench = ScriptedBench()
    _, ticket = await bench.hold()
    with pytest.raises(InvalidRequest, match="reader"):
        await bench.release(ticket, "")
    assert await bench.release(ticket, "a") is Verdict.VALID
    bench.assert_idle()


@virtual_time
async def test_owner_without_checksums_says_so_and_the_ticket_stays() -> None:
    bench = ScriptedBench()
    _, ticket = await bench.hold()
    with pytest.raises(LayoutMismatch, match=r"kv_transfer\.checksum"):
        await bench.release_with_checksums(ticket)
    assert await bench.release(ticket) is Verdict.VALID
    bench.assert_idle()


async def test_checksums_come_with_the_verdict_and_a_second_time_though_the_blocks_are_gone() -> None:
    inspector = Inspector()
    inspector.may_answer.set()
    bench = ScriptedBench(checksum=inspector)
    seq_id, ticket = await bench.hold()
    expected = Released(Verdict.VALID, (107, 108, 109))
    assert await bench.release_with_checksums(ticket) == expected
    assert bench.engine.take() == [ReleaseSequence(seq_id)]
    assert await bench.release_with_checksums(ticket) == expected
    assert await bench.release_with_checksums(ticket, "b") == Released(Verdict.EXPIRED)
    assert inspector.asked_for == [(7, 8, 9)]
    bench.expiry.cancel()


async def test_no_checksums_of_a_prefill_that_is_not_done() -> None:
    inspector = Inspector()
    bench = ScriptedBench(checksum=inspector)
    bench.submit()
    seq_id = bench.added()
    await bench.allocate(seq_id)
    ticket = bench.ticket()
    await bench.emit(PrefillProgressed(seq_id, 8))
    assert await bench.release_with_checksums(ticket) == Released(Verdict.EXPIRED)
    assert inspector.asked_for == []
    bench.assert_idle()
    bench.expiry.cancel()


class HandClock:
    """Moved by the test: threads do not know of virtual time."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def test_lease_cannot_lapse_while_the_blocks_are_looked_at() -> None:
    inspector, clock = Inspector(), HandClock()
    bench = ScriptedBench(checksum=inspector, clock=clock)
    _, ticket = await bench.hold()
    release = asyncio.create_task(bench.release_with_checksums(ticket))
    await inspector.until_asked()
    clock.now_s += 10 * LEASE_S
    bench.holder.expire()
    assert len(bench.holder) == 1
    inspector.may_answer.set()
    assert await release == Released(Verdict.VALID, (107, 108, 109))
    bench.assert_idle()
    bench.expiry.cancel()


async def test_reader_that_dies_while_the_blocks_are_looked_at_leaves_an_orphan() -> None:
    inspector, clock = Inspector(), HandClock()
    bench = ScriptedBench(checksum=inspector, clock=clock)
    seq_id, ticket = await bench.hold()
    release = asyncio.create_task(bench.release_with_checksums(ticket))
    await inspector.until_asked()
    release.cancel()
    with pytest.raises(asyncio.CancelledError):
        await release
    inspector.may_answer.set()
    assert bench.sample("splitserve_lease_orphaned_total") == 1
    clock.now_s += ORPHAN_GRACE_S
    bench.holder.expire()
    assert bench.engine.take() == [ReleaseSequence(seq_id)]
    assert await bench.release(ticket) is Verdict.EXPIRED
    bench.assert_idle()
    bench.expiry.cancel()


async def test_ticket_that_ends_while_its_blocks_are_looked_at_is_expired() -> None:
    inspector = Inspector()
    bench = ScriptedBench(checksum=inspector)
    seq_id, ticket = await bench.hold()
    release = asyncio.create_task(bench.release_with_checksums(ticket))
    await inspector.until_asked()
    bench.abort()
    assert bench.engine.take() == [ReleaseSequence(seq_id)]
    inspector.may_answer.set()
    assert await release == Released(Verdict.EXPIRED)
    bench.assert_idle()
    bench.expiry.cancel()


async def test_second_reader_that_is_faster_fences_the_one_whose_checksums_are_computed() -> None:
    inspector = Inspector()
    bench = ScriptedBench(checksum=inspector)
    _, ticket = await bench.hold()
    slow = asyncio.create_task(bench.release_with_checksums(ticket, "a"))
    await inspector.until_asked()
    assert await bench.release(ticket, "b") is Verdict.VALID
    inspector.may_answer.set()
    assert await slow == Released(Verdict.EXPIRED)
    assert bench.sample("splitserve_readers_fenced_total") == 1
    bench.assert_idle()
    bench.expiry.cancel()


async def test_reader_that_asks_twice_at_once_gets_the_same_checksums() -> None:
    """The second answer is computed from blocks that the first one has given back."""
    answers = iter([[1, 2, 3], [7, 7, 7]])
    bench = ScriptedBench(checksum=lambda block_ids: next(answers))
    _, ticket = await bench.hold()
    twice = await asyncio.gather(*(bench.release_with_checksums(ticket) for _ in range(2)))
    assert twice[0].verdict is Verdict.VALID
    assert twice[0] == twice[1]
    bench.assert_idle()
    bench.expiry.cancel()


async def test_few_checksums_are_remembered() -> None:
    checksums = Checksums(lambda block_ids: [], max_remembered=2)
    for name in ("t1", "t2", "t3"):
        checksums.remember(TicketId(name), (1,))
    checksums.remember(TicketId("t3"), (2,))
    assert [checksums.told(TicketId(name)) for name in ("t1", "t2", "t3")] == [(), (1,), (1,)]
