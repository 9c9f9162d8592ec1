"""Places in flight, the queue for them, and which worker is chosen."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from virtual_time import settle, virtual_time

from protocol.errors import DeadlineExceeded, Overloaded, StartupError
from protocol.ids import Role
from protocol.membership import Load
from router import LeastOutstandingWork, RouterSettings
from router.admission import Admission


@dataclass
class Visitors:
    """Tasks that hold a place until they are told to go."""

    admission: Admission
    entered: list[str] = field(default_factory=list)

    def visit(
        self, name: str, priority: int = 0, timeout_s: float = 100.0
    ) -> tuple[asyncio.Task[None], asyncio.Event]:
        may_go = asyncio.Event()

        async def stay() -> None:
            async with self.admission.place(priority, timeout_s):
                self.entered.append(name)
                await may_go.wait()

        return asyncio.create_task(stay()), may_go


@virtual_time
async def test_places_go_by_priority_then_by_arrival() -> None:
    visitors = Visitors(Admission(1, 10, 1.0))
    _, gate = visitors.visit("first")
    await settle()
    visits = [visitors.visit(name, priority) for name, priority in (("b", 1), ("c", 1), ("a", 0))]
    await settle()
    assert visitors.admission.num_queued == 3
    for may_go in (gate, *(may_go for _, may_go in visits)):
        may_go.set()
    await asyncio.gather(*(task for task, _ in visits))
    assert visitors.entered == ["first", "a", "b", "c"]
    visitors.admission.assert_idle()


@virtual_time
async def test_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    visitors = Visitors(Admission(1, 1, 7.0))
    one, gate = visitors.visit("one")
    two, gate_two = visitors.visit("two")
    await settle()
    with pytest.raises(Overloaded) as caught:
        async with visitors.admission.place(0, 1.0):
            pass
    assert caught.value.retry_after_s == 7.0
    gate.set()
    gate_two.set()
    await asyncio.gather(one, two)
    visitors.admission.assert_idle()


@virtual_time
async def test_wait_ends_at_the_deadline() -> None:
    visitors = Visitors(Admission(1, 5, 1.0))
    one, gate = visitors.visit("one")
    late, _ = visitors.visit("late", timeout_s=3.0)
    with pytest.raises(DeadlineExceeded):
        await late
    gate.set()
    await one
    visitors.admission.assert_idle()


@pytest.mark.parametrize("release_first", [True, False])
def test_place_is_not_lost_when_grant_and_cancellation_cross(release_first: bool) -> None:
    @virtual_time
    async def scenario() -> None:
        visitors = Visitors(Admission(1, 5, 1.0))
        _, gate = visitors.visit("one")
        await settle()
        leaving, _ = visitors.visit("leaving")
        staying, may_go = visitors.visit("staying")
        may_go.set()
        await settle()
        if release_first:
            gate.set()
            await asyncio.sleep(0)
            leaving.cancel()
        else:
            leaving.cancel()
            gate.set()
        await asyncio.wait([leaving, staying], timeout=10)
        assert leaving.cancelled()
        assert visitors.entered == ["one", "staying"]
        visitors.admission.assert_idle()

    scenario()


@dataclass
class FakeCandidate:
    name: str
    load: Load = field(default_factory=Load)
    num_outstanding: int = 0
    outstanding_tokens: int = 0
    last_assigned: int = 0


def chosen(role: Role, *candidates: FakeCandidate) -> str:
    return LeastOutstandingWork().choose(role, candidates).name


def test_prefill_goes_by_tokens_and_decode_by_sequences() -> None:
    few_long = FakeCandidate("few long", Load(num_waiting_tokens=9000, num_running=1), 1, 9000)
    many_short = FakeCandidate("many short", Load(num_waiting_tokens=300, num_running=30), 30, 300)
    assert chosen(Role.PREFILL, few_long, many_short) == "many short"
    assert chosen(Role.DECODE, few_long, many_short) == "few long"


def test_own_requests_count_before_the_worker_reports_them() -> None:
    busy = FakeCandidate("busy", num_outstanding=1, outstanding_tokens=10)
    assert chosen(Role.PREFILL, busy, FakeCandidate("free")) == "free"
    assert chosen(Role.DECODE, busy, FakeCandidate("free")) == "free"


def test_ties_go_to_free_blocks_then_in_turn() -> None:
    small, large = FakeCandidate("small", Load(blocks_free=5)), FakeCandidate("large", Load(blocks_free=50))
    assert chosen(Role.DECODE, small, large) == "large"
    recent, idle = FakeCandidate("recent", last_assigned=9), FakeCandidate("idle", last_assigned=3)
    assert chosen(Role.PREFILL, recent, idle) == "idle"


def test_held_blocks_count_as_work_for_decode() -> None:
    fetching = FakeCandidate("fetching", Load(num_held=4))
    assert chosen(Role.DECODE, fetching, FakeCandidate("busy", Load(num_running=3))) == "busy"


@pytest.mark.parametrize(
    "changes", [{"max_in_flight": 0}, {"num_retries": -1}, {"request_timeout_s": 0.0}, {"api_key": ""}]
)
def test_settings_that_make_no_sense_stop_the_start(changes: dict[str, object]) -> None:
    with pytest.raises(StartupError):
        RouterSettings(**changes)  # type: ignore[arg-type]


def test_settings_do_not_show_the_key() -> None:
    assert "k3y" not in repr(RouterSettings(api_key="k3y"))
