"""Leases, stepped by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kv_transfer import LeaseTable
from protocol.errors import EngineFault
from protocol.handoff import NOT_HELD, LeaseStatus, Verdict
from protocol.ids import TicketId

T1, T2, T3 = TicketId("t1"), TicketId("t2"), TicketId("t3")
A, B = "reader a", "reader b"


class Clock:
    now = 500.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> Iterator[LeaseTable]:
    table = LeaseTable(clock)
    yield table
    clock.now += 1e6
    table.expire()
    table.assert_idle()


def test_a_lease_released_in_time_is_valid(table: LeaseTable, clock: Clock) -> None:
    table.grant(T1, 10.0, num_tokens=7, tokens_ready=7)
    clock.now += 9.9
    assert table.release(T1, A) is Verdict.VALID
    table.assert_idle()


def test_a_verdict_is_sticky(table: LeaseTable, clock: Clock) -> None:
    table.grant(T1, 10.0, num_tokens=7, tokens_ready=7)
    table.grant(T2, 10.0, num_tokens=7, tokens_ready=7)
    first = table.release(T1, A)
    clock.now += 100
    assert table.expire() == [T2]
    assert [table.release(T1, A), table.release(T1, A)] == [first, Verdict.VALID]
    assert [table.release(T2, A), table.release(T2, A)] == [Verdict.EXPIRED] * 2
    table.drop(T1)
    assert table.release(T1, A) is Verdict.VALID


def test_an_unknown_ticket_is_unknown(table: LeaseTable) -> None:
    assert table.release(T1, A) is Verdict.UNKNOWN
    assert table.renew(T1) == NOT_HELD
    assert not table.drop(T1)


def test_renewals_keep_a_lease_beyond_its_first_deadline(table: LeaseTable, clock: Clock) -> None:
    table.grant(T1, 10.0, num_tokens=7, tokens_ready=7)
    for _ in range(3):
        clock.now += 9
        assert table.renew(T1) == LeaseStatus(held=True, tokens_ready=7, lease_s=10.0)
    assert table.release(T1, A) is Verdict.VALID


def test_a_lease_has_lapsed_at_its_deadline_even_if_nobody_ran_expire(
    table: LeaseTable, clock: Clock
) -> None:
    table.grant(T1, 10.0, num_tokens=7, tokens_ready=7)
    table.grant(T2, 10.0, num_tokens=7, tokens_ready=7)
    clock.now += 10.0
    assert table.renew(T1) == NOT_HELD
    assert table.release(T2, A) is Verdict.EXPIRED


def test_a_lapsed_lease_cannot_be_renewed_back_to_life(table: LeaseTable, clock: Clock) -> None:
    table.grant(T1, 10.0, num_tokens=7, tokens_ready=7)
    clock.now += 10.0
    table.renew(T1)
    clock.now -= 5.0  # whatever the clock says later
    assert table.renew(T1) == NOT_HELD
    assert table.release(T1, A) is Verdict.EXPIRED


def test_expire_reports_each_lapsed_ticket_once_however_the_lapse_was_found(
    table: LeaseTable, clock: Clock
) -> None:
    for ticket_id in (T1, T2, T3):
        table.grant(ticket_id, 10.0, num_tokens=7, tokens_ready=7)
    clock.now += 10.0
    table.renew(T2)
    table.release(T3, A)
    assert table.num_held == 3
    assert table.expire() == [T1, T2, T3]
    assert table.expire() == []
    assert table.num_held == 0


def test_a_lease_cannot_lapse_while_the_owner_computes(table: LeaseTable, clock: Clock) -> None:
    table.grant(T1, 10.0, num_tokens=7)
    for tokens_ready in (0, 3, 6):
        clock.now += 1000
        table.progress(T1, tokens_ready)
        assert table.expire() == []
    assert table.next_deadline() is None
    assert not table.is_complete(T1)
    assert table.renew(T1) == LeaseStatus(held=True, tokens_ready=6, lease_s=10.0)
    table.drop(T1)


def test_the_lease_starts_anew_when_the_last_token_is_ready(table: LeaseTable, clock: Clock) -> None:
    table.grant(T1, 10.0, num_tokens=7)
    clock.now += 1000
    table.progress(T1, 7)
    assert table.is_complete(T1)
    assert table.next_deadline() == clock.now + 10.0
    clock.now += 10.0
    assert table.expire() == [T1]
    assert not table.is_complete(T1)


def test_a_status_is_no_renewal(table: LeaseTable, clock: Clock) -> None:
    table.grant(T1, 10.0, num_tokens=7, tokens_ready=7)
    clock.now += 9
    assert table.status(T1).held
    clock.now += 1
    assert table.status(T1) == NOT_HELD


def test_the_verdict_is_valid_for_the_first_reader_alone(table: LeaseTable) -> None:
    """A ticket may be offered to a second reader, which must not take what was freed for its own."""
    table.grant(T1, 10.0, num_tokens=7, tokens_ready=7)
    assert not table.is_fenced(T1, B)
    assert [table.release(T1, reader) for reader in (A, B, A, B)] == [
        Verdict.VALID,
        Verdict.EXPIRED,
        Verdict.VALID,
        Verdict.EXPIRED,
    ]
    assert [table.is_fenced(T1, reader) for reader in (A, B)] == [False, True]


def test_an_expired_ticket_is_expired_for_all_readers(table: LeaseTable) -> None:
    table.grant(T1, 10.0, num_tokens=7)
    assert [table.release(T1, reader) for reader in (A, B, A)] == [Verdict.EXPIRED] * 3
    assert not table.is_fenced(T1, A)
    assert not table.is_fenced(T1, B)


def test_an_orphaned_lease_is_cut_short_and_a_renewal_restores_it(table: LeaseTable, clock: Clock) -> None:
    for ticket_id in (T1, T2):
        table.grant(ticket_id, 10.0, num_tokens=7, tokens_ready=7)
        assert table.orphan(ticket_id, 1.0)
    clock.now += 0.9
    assert table.renew(T1).held
    clock.now += 0.1
    assert table.expire() == [T2]
    clock.now += 9.7
    assert table.release(T1, A) is Verdict.VALID


def test_orphaning_never_makes_a_lease_longer(table: LeaseTable, clock: Clock) -> None:
    table.grant(T1, 10.0, num_tokens=7, tokens_ready=7)
    clock.now += 9.5
    assert table.orphan(T1, 1.0)
    clock.now += 0.5
    assert table.expire() == [T1]


def test_orphaning_does_nothing_to_a_lease_that_is_gone_or_cannot_lapse(
    table: LeaseTable, clock: Clock
) -> None:
    table.grant(T1, 10.0, num_tokens=7)
    assert not table.orphan(T1, 1.0)
    table.progress(T1, 7)
    assert table.next_deadline() == clock.now + 10.0
    table.release(T1, A)
    assert not table.orphan(T1, 1.0)
    assert table.release(T1, A) is Verdict.VALID


def test_a_pinned_lease_holds_and_starts_anew(table: LeaseTable, clock: Clock) -> None:
    table.grant(T1, 10.0, num_tokens=7, tokens_ready=7)
    with table.pinned(T1):
        with table.pinned(T1):
            clock.now += 100
            assert table.expire() == []
        clock.now += 100
        assert not table.orphan(T1, 1.0)
        assert table.next_deadline() is None
    clock.now += 9.9
    assert table.release(T1, A) is Verdict.VALID


def test_a_pinned_lease_can_be_ended(table: LeaseTable, clock: Clock) -> None:
    table.grant(T1, 10.0, num_tokens=7, tokens_ready=7)
    with table.pinned(T1):
        assert table.drop(T1)
    assert table.release(T1, A) is Verdict.EXPIRED
    with table.pinned(T1):  # of a lease that is gone: nothing
        clock.now += 1


def test_a_dropped_ticket_is_expired_for_its_reader(table: LeaseTable) -> None:
    table.grant(T1, 10.0, num_tokens=7, tokens_ready=7)
    assert table.drop(T1)
    assert not table.drop(T1)
    assert table.renew(T1) == NOT_HELD
    assert table.release(T1, A) is Verdict.EXPIRED
    assert table.expire() == []


def test_a_lapsed_ticket_is_reported_by_expire_and_not_by_drop(table: LeaseTable, clock: Clock) -> None:
    """Otherwise its blocks would be freed twice."""
    table.grant(T1, 10.0, num_tokens=7, tokens_ready=7)
    clock.now += 10.0
    assert not table.drop(T1)
    assert table.expire() == [T1]


def test_a_release_before_all_tokens_are_ready_is_never_valid(table: LeaseTable) -> None:
    """The reader gave up, or it read blocks that were not finished: nobody may use them."""
    table.grant(T1, 10.0, num_tokens=7)
    table.progress(T1, 6)
    assert table.release(T1, A) is Verdict.EXPIRED


def test_progress_never_goes_back(table: LeaseTable) -> None:
    table.grant(T1, 10.0, num_tokens=7, tokens_ready=4)
    assert not table.progress(T1, 2)
    assert not table.progress(T1, 4)
    assert table.status(T1).tokens_ready == 4
    assert table.progress(T1, 6)
    assert table.renew(T1).tokens_ready == 6
    table.drop(T1)


def test_progress_of_a_ticket_that_is_gone_is_ignored(table: LeaseTable) -> None:
    assert not table.progress(T1, 3)
    table.grant(T1, 10.0, num_tokens=7)
    table.drop(T1)
    assert not table.progress(T1, 7)
    assert table.release(T1, A) is Verdict.EXPIRED


def test_impossible_grants_and_progress_are_refused(table: LeaseTable) -> None:
    for lease_s, num_tokens, tokens_ready in ((0.0, 7, 0), (float("nan"), 7, 0), (1.0, 7, 8), (1.0, 7, -1)):
        with pytest.raises(ValueError):
            table.grant(T1, lease_s, num_tokens, tokens_ready)
    table.grant(T1, 10.0, num_tokens=7)
    with pytest.raises(ValueError):
        table.progress(T1, 8)
    table.drop(T1)


def test_a_ticket_id_is_granted_once(table: LeaseTable) -> None:
    table.grant(T1, 10.0, num_tokens=7, tokens_ready=7)
    with pytest.raises(ValueError, match="t1"):
        table.grant(T1, 10.0, num_tokens=7)
    table.release(T1, A)
    with pytest.raises(ValueError, match="t1"):
        table.grant(T1, 10.0, num_tokens=7)


def test_the_next_deadline_is_the_earliest(table: LeaseTable, clock: Clock) -> None:
    assert table.next_deadline() is None
    table.grant(T1, 10.0, num_tokens=7, tokens_ready=7)
    table.grant(T2, 5.0, num_tokens=7, tokens_ready=7)
    table.grant(T3, 1.0, num_tokens=7)  # is being computed
    assert table.next_deadline() == clock.now + 5.0
    table.drop(T2)
    assert table.next_deadline() == clock.now + 10.0
    table.drop(T3)


def test_a_lapse_that_a_renewal_found_is_still_due_for_expire(table: LeaseTable, clock: Clock) -> None:
    table.grant(T1, 10.0, num_tokens=7, tokens_ready=7)
    clock.now += 11.0
    table.renew(T1)
    deadline = table.next_deadline()
    assert deadline is not None
    assert deadline <= clock.now


def test_the_oldest_verdicts_are_forgotten(clock: Clock) -> None:
    table = LeaseTable(clock, max_verdicts=2)
    for ticket_id in (T1, T2, T3):
        table.grant(ticket_id, 10.0, num_tokens=1, tokens_ready=1)
        table.release(ticket_id, A)
    assert table.release(T1, A) is Verdict.UNKNOWN
    assert [table.release(T2, A), table.release(T3, A)] == [Verdict.VALID] * 2


def test_assert_idle_names_what_is_held(clock: Clock) -> None:
    table = LeaseTable(clock)
    table.grant(T1, 10.0, num_tokens=1)
    with pytest.raises(EngineFault, match="t1"):
        table.assert_idle()
