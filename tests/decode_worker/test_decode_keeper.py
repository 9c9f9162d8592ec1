"""Progress and lease of one ticket, as its owner tells them. Virtual time."""

from __future__ import annotations

import asyncio

import pytest
from decode_fakes import LEASE_S, FakeOwner, make_ticket
from virtual_time import settle, virtual_time
from worker_fakes import make_request

from decode_worker.keeper import MAX_WAIT_S, SILENCE_LIMIT_S, LeaseKeeper
from decode_worker.owner import ANSWER_LIMIT_S
from decode_worker.reservation import PrefillPace, Rate
from protocol.errors import LeaseExpired, TransferError, TransferFailed, WorkerUnavailable

NUM_TOKENS = 10


class Bench:
    """A keeper on a fake owner. To be built on a running loop."""

    def __init__(self, tokens_ready: int = 0) -> None:
        self.clock = asyncio.get_running_loop().time
        self.owner = FakeOwner()
        self.owner.compute(tokens_ready)
        self.rate = Rate()
        self.losses: list[tuple[float, TransferError]] = []
        ticket = make_ticket(make_request(num_prompt=NUM_TOKENS), tokens_ready=tokens_ready)
        pace = PrefillPace(NUM_TOKENS, tokens_ready, self.rate, self.clock)
        self._started_s = self.clock()
        self.keeper = LeaseKeeper(ticket, self.owner, pace, self._on_lost, self.clock)

    def _on_lost(self, error: TransferError) -> None:
        self.losses.append((self.clock() - self._started_s, error))

    async def stop(self) -> None:
        await self.keeper.stop()
        assert self.owner.num_waiting == 0


@virtual_time
async def test_progress_is_known_as_soon_as_the_owner_has_it() -> None:
    bench = Bench()
    await settle()
    progress = bench.keeper.progress
    await asyncio.sleep(0.5)
    bench.owner.compute(4)
    await settle()
    assert progress.done()
    assert (bench.keeper.tokens_ready, bench.keeper.is_complete) == (4, False)
    assert not bench.keeper.progress.done()
    bench.owner.compute(NUM_TOKENS)
    await settle()
    assert bench.keeper.complete_s == bench.clock()
    await bench.stop()


@virtual_time
async def test_rate_of_the_prefill_is_measured_between_its_chunks() -> None:
    bench = Bench()
    await settle()
    for tokens_ready in (2, 4, 6):
        await asyncio.sleep(0.5)
        bench.owner.compute(tokens_ready)
        await settle()
    assert bench.rate.per_s == pytest.approx(4.0)
    await bench.stop()


@virtual_time
async def test_one_call_is_always_under_way_and_no_more() -> None:
    bench = Bench(tokens_ready=NUM_TOKENS)
    for _ in range(100):
        await asyncio.sleep(0.2)
        assert bench.owner.num_waiting == 1
    assert bench.owner.num_renewals <= 2 + 20 / min(MAX_WAIT_S, LEASE_S / 3)
    await bench.stop()


@virtual_time
async def test_stopped_keeper_breaks_its_call_and_asks_no_more() -> None:
    bench = Bench()
    await settle()
    await bench.stop()
    num_renewals = bench.owner.num_renewals
    await asyncio.sleep(60)
    await bench.stop()
    assert bench.owner.num_renewals == num_renewals
    assert bench.losses == []


@virtual_time
async def test_lease_that_the_owner_gave_up_is_lost_at_once() -> None:
    bench = Bench()
    await asyncio.sleep(0.5)
    bench.owner.lose()
    await settle()
    ((after_s, error),) = bench.losses
    assert after_s == pytest.approx(0.5)
    assert isinstance(error, LeaseExpired)
    await bench.stop()


@virtual_time
async def test_owner_that_refuses_every_call_is_lost_after_the_silence_limit() -> None:
    bench = Bench()
    await settle()
    bench.owner.die()
    await asyncio.sleep(SILENCE_LIMIT_S - 0.1)
    assert bench.losses == []
    await asyncio.sleep(0.3)
    ((_, error),) = bench.losses
    assert isinstance(error, TransferFailed)
    assert "is silent: connection refused" in error.message
    await bench.stop()


@virtual_time
async def test_owner_behind_a_cut_network_is_lost_within_five_seconds() -> None:
    bench = Bench()
    await settle()
    bench.owner.hang()
    await asyncio.sleep(MAX_WAIT_S + ANSWER_LIMIT_S)
    assert bench.losses == []
    await asyncio.sleep(10)
    ((after_s, error),) = bench.losses
    assert after_s == pytest.approx(MAX_WAIT_S + SILENCE_LIMIT_S, abs=0.01)
    assert isinstance(error, TransferFailed)
    await bench.stop()


@virtual_time
async def test_keeper_that_breaks_counts_as_a_lost_lease_and_says_what_broke_it() -> None:
    class Broken(FakeOwner):
        async def renew(self, ticket, tokens_known, wait_s):  # type: ignore[no-untyped-def]
            raise KeyError("lease_s")

    bench = Bench()
    await bench.stop()
    losses: list[TransferError] = []
    ticket = make_ticket(make_request(num_prompt=NUM_TOKENS), tokens_ready=0)
    pace = PrefillPace(NUM_TOKENS, 0, Rate(), bench.clock)
    keeper = LeaseKeeper(ticket, Broken(), pace, losses.append, bench.clock)
    await settle()
    (error,) = losses
    assert isinstance(error, TransferFailed)
    assert "is not kept any more: KeyError: 'lease_s'" in error.message
    with pytest.raises(KeyError):
        await keeper.stop()


@virtual_time
async def test_owner_that_answers_again_in_time_is_kept() -> None:
    bench = Bench()
    for _ in range(5):
        await asyncio.sleep(2)
        bench.owner.fails_with = WorkerUnavailable("no route")
        await asyncio.sleep(SILENCE_LIMIT_S * 0.9)
        bench.owner.fails_with = None
    assert bench.losses == []
    await bench.stop()


@virtual_time
async def test_owner_that_never_waits_is_not_asked_in_a_busy_loop() -> None:
    class Hasty(FakeOwner):
        async def renew(self, ticket, tokens_known, wait_s):  # type: ignore[no-untyped-def]
            return await super().renew(ticket, tokens_known, 0.0)

    bench = Bench()
    await bench.stop()
    owner = Hasty()
    owner.compute(0)
    ticket = make_ticket(make_request(num_prompt=NUM_TOKENS), tokens_ready=0)
    pace = PrefillPace(NUM_TOKENS, 0, Rate(), bench.clock)
    keeper = LeaseKeeper(ticket, owner, pace, lambda error: None, bench.clock)
    await asyncio.sleep(10)
    assert owner.num_renewals < 250
    await keeper.stop()


@virtual_time
async def test_owner_that_boasts_of_more_tokens_than_the_ticket_has_is_not_believed() -> None:
    bench = Bench()
    bench.owner.compute(NUM_TOKENS + 5)
    await settle()
    assert bench.keeper.tokens_ready == NUM_TOKENS
    await bench.stop()
