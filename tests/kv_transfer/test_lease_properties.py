"""Leases under random histories, against a model that is too simple to be wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kv_transfer import LeaseTable
from protocol.handoff import Verdict
from protocol.ids import TicketId

MAX_VERDICTS = 6
NUM_TOKENS = 4


@dataclass
class Grant:
    """What the model knows of a ticket."""

    lease_s: float
    deadline: float = math.inf
    tokens_ready: int = 0
    may_be_valid: bool = True
    """Held without a break until now."""
    verdict: Verdict | None = None
    """The first that was given."""
    reader: str = ""
    """Who got it, if it was VALID."""
    num_endings: int = 0
    """How often the owner was told that the blocks may be freed."""

    @property
    def is_held(self) -> bool:
        return self.may_be_valid and self.num_endings == 0

    @property
    def is_complete(self) -> bool:
        return self.tokens_ready == NUM_TOKENS


class LeaseMachine(RuleBasedStateMachine):
    """Never VALID after a lapse or for two readers; verdicts are sticky; every ticket ends exactly once."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.table = LeaseTable(lambda: self.now, max_verdicts=MAX_VERDICTS)
        self.grants: dict[TicketId, Grant] = {}

    @rule(target=tickets, lease_s=st.sampled_from([1.0, 2.5, 10.0]))
    def grant(self, lease_s: float) -> TicketId:
        ticket_id = TicketId(f"t{len(self.grants)}")
        self.table.grant(ticket_id, lease_s, num_tokens=NUM_TOKENS)
        self.grants[ticket_id] = Grant(lease_s)
        return ticket_id

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for grant in self.grants.values():
            if self.now >= grant.deadline:
                grant.may_be_valid = False

    @rule(ticket_id=tickets, tokens_ready=st.integers(0, NUM_TOKENS))
    def progress(self, ticket_id: TicketId, tokens_ready: int) -> None:
        grant = self.grants[ticket_id]
        is_news = grant.is_held and tokens_ready > grant.tokens_ready
        assert self.table.progress(ticket_id, tokens_ready) == is_news
        if is_news:
            grant.tokens_ready = tokens_ready
        if is_news and grant.is_complete:
            grant.deadline = self.now + grant.lease_s

    @rule(ticket_id=tickets)
    def renew(self, ticket_id: TicketId) -> None:
        grant = self.grants[ticket_id]
        status = self.table.renew(ticket_id)
        assert status.held == grant.is_held
        if status.held:
            assert status.tokens_ready == grant.tokens_ready
        if status.held and grant.is_complete:
            grant.deadline = self.now + grant.lease_s

    @rule(ticket_id=tickets, grace_s=st.sampled_from([0.5, 1.0]))
    def orphan(self, ticket_id: TicketId, grace_s: float) -> None:
        grant = self.grants[ticket_id]
        is_cut = grant.is_held and grant.is_complete
        assert self.table.orphan(ticket_id, grace_s) == is_cut
        if is_cut:
            grant.deadline = min(grant.deadline, self.now + grace_s)

    @rule(ticket_id=tickets, seconds=st.sampled_from([0.5, 20.0]), is_dropped=st.booleans())
    def inspect(self, ticket_id: TicketId, seconds: float, is_dropped: bool) -> None:
        grant = self.grants[ticket_id]
        deadline, grant.deadline = grant.deadline, math.inf
        is_pinned = grant.is_held
        if not is_pinned:
            grant.deadline = deadline
        with self.table.pinned(ticket_id):
            self.wait(seconds)
            if is_dropped:
                self.drop(ticket_id)
        if is_pinned and grant.is_complete:
            grant.deadline = self.now + grant.lease_s

    @rule(ticket_id=tickets, reader=st.sampled_from(["a", "b"]))
    def release(self, ticket_id: TicketId, reader: str) -> None:
        grant = self.grants[ticket_id]
        is_held = grant.is_held
        verdict = self.table.release(ticket_id, reader)
        if is_held:
            grant.num_endings += 1
            assert verdict is (Verdict.VALID if grant.is_complete else Verdict.EXPIRED)
            grant.verdict, grant.reader = verdict, reader
        elif grant.verdict is Verdict.VALID and grant.reader == reader:
            assert verdict in (Verdict.VALID, Verdict.UNKNOWN)
        else:
            assert verdict in (Verdict.EXPIRED, Verdict.UNKNOWN)
        if verdict is Verdict.UNKNOWN:  # forgotten, and never remembered again
            grant.verdict = Verdict.UNKNOWN

    @rule(ticket_id=tickets)
    def drop(self, ticket_id: TicketId) -> None:
        grant = self.grants[ticket_id]
        is_held = grant.is_held
        assert self.table.drop(ticket_id) == is_held
        if is_held:
            grant.num_endings += 1
            grant.verdict = Verdict.EXPIRED

    @rule()
    def expire(self) -> None:
        for ticket_id in self.table.expire():
            assert not self.grants[ticket_id].may_be_valid
            self.grants[ticket_id].num_endings += 1

    @invariant()
    def no_ticket_ends_twice(self) -> None:
        assert all(grant.num_endings <= 1 for grant in self.grants.values())

    @invariant()
    def num_held_counts_those_that_have_not_ended(self) -> None:
        assert self.table.num_held == sum(grant.num_endings == 0 for grant in self.grants.values())

    @invariant()
    def next_deadline_is_the_earliest_of_those_that_can_lapse(self) -> None:
        deadlines = [grant.deadline for grant in self.grants.values() if grant.num_endings == 0]
        earliest = min(deadlines, default=math.inf)
        assert self.table.next_deadline() == (None if math.isinf(earliest) else earliest)

    def teardown(self) -> None:
        for ticket_id in self.grants:
            self.progress(ticket_id, NUM_TOKENS)
        self.wait(1e6)
        self.expire()
        self.table.assert_idle()
        assert all(grant.num_endings == 1 for grant in self.grants.values())


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
