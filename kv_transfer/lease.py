"""Does a ticket's KV still belong to it? The owner's book of leases.

    grant --> COMPUTING --all ready--> HELD --release by a reader--> VALID    the caller frees now
                 |                       |----drop-----------------> EXPIRED  the caller frees now
                 |                       \\----deadline passed------> EXPIRED  `expire` reports it once
                 \\----release, drop----------------------------------> EXPIRED  the caller frees now

A lease cannot lapse while the owner still computes or inspects the KV: whoever asked for that bounds it.
Its time starts anew when the last token is ready.

Verdicts are remembered up to a count, the oldest forgotten first: a forgotten ticket is `UNKNOWN`,
which readers treat like `EXPIRED`. `VALID` is remembered with its reader; all others get `EXPIRED`. The
clock is asked at every call, so a lapse counts from its moment on, whether or not `expire` has run since.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from protocol.errors import EngineFault
from protocol.handoff import NOT_HELD, LeaseStatus, Verdict
from protocol.ids import TicketId
from protocol.ports import Clock

MAX_VERDICTS = 100_000
"""Far more than the tickets of any time span in which a reader still asks again; about 30 MB."""


@dataclass(slots=True)
class _Lease:
    lease_s: float
    due_s: float
    """Clock time of the lapse, where it can lapse."""
    num_tokens: int
    tokens_ready: int
    num_pins: int = 0
    lapsed: bool = False
    """True: the verdict is EXPIRED already, and `expire` has yet to report the ticket."""

    @property
    def is_complete(self) -> bool:
        return self.tokens_ready == self.num_tokens

    @property
    def deadline_s(self) -> float:
        can_lapse = self.is_complete and self.num_pins == 0
        return self.due_s if can_lapse or self.lapsed else math.inf


@dataclass(frozen=True, slots=True)
class _Ending:
    verdict: Literal[Verdict.VALID, Verdict.EXPIRED]
    reader: str = ""
    """For whom it is VALID."""


_EXPIRED = _Ending(Verdict.EXPIRED)


class LeaseTable:
    """Pure bookkeeping on an injected clock; one thread owns it.

    Every granted ticket ends exactly once: by the first `release` or `drop` of a lease that holds, or
    by `expire`. That is when the caller frees its blocks.
    """

    def __init__(self, clock: Clock, max_verdicts: int = MAX_VERDICTS) -> None:
        if max_verdicts < 1:
            raise ValueError(f"max_verdicts is {max_verdicts} and must be at least 1")
        self._clock = clock
        self._max_verdicts = max_verdicts
        self._leases: dict[TicketId, _Lease] = {}
        self._endings: OrderedDict[TicketId, _Ending] = OrderedDict()

    @property
    def num_held(self) -> int:
        """Tickets whose blocks have not been given back, those that `expire` will report included."""
        return len(self._leases)

    def grant(self, ticket_id: TicketId, lease_s: float, num_tokens: int, tokens_ready: int = 0) -> None:
        """Start a lease on the KV of `num_tokens` tokens, that needs a renewal every `lease_s` seconds
        from the last one's completion on.

        Raises `ValueError` for a ticket id that was used before, or a lease that cannot hold.
        """
        if ticket_id in self._leases or ticket_id in self._endings:
            raise ValueError(f"ticket {ticket_id} was granted before")
        if not lease_s > 0:
            raise ValueError(f"a lease needs more than {lease_s} seconds")
        if not 0 <= tokens_ready <= num_tokens:
            raise ValueError(f"{tokens_ready} of {num_tokens} tokens cannot be ready")
        self._leases[ticket_id] = _Lease(lease_s, self._clock() + lease_s, num_tokens, tokens_ready)

    def progress(self, ticket_id: TicketId, tokens_ready: int) -> bool:
        """Note that the KV of the first `tokens_ready` tokens is complete. True when that is news.

        Never goes back. A ticket that is not held is ignored: the prefill raced with the lease's end.
        Raises `ValueError` for more tokens than were granted.
        """
        lease = self._held(ticket_id)
        if lease is None:
            return False
        if tokens_ready > lease.num_tokens:
            raise ValueError(f"{tokens_ready} tokens ready of a ticket for {lease.num_tokens}")
        if tokens_ready <= lease.tokens_ready:
            return False
        lease.tokens_ready = tokens_ready
        if lease.is_complete:
            self._start_anew(lease)
        return True

    def status(self, ticket_id: TicketId) -> LeaseStatus:
        """What a renewal would say, without one."""
        lease = self._held(ticket_id)
        return NOT_HELD if lease is None else LeaseStatus(True, lease.tokens_ready, lease.lease_s)

    def is_complete(self, ticket_id: TicketId) -> bool:
        """Whether the ticket is held and all its tokens are ready."""
        lease = self._held(ticket_id)
        return lease is not None and lease.is_complete

    def renew(self, ticket_id: TicketId) -> LeaseStatus:
        """Start the lease's time anew, if it still holds."""
        lease = self._held(ticket_id)
        if lease is not None:
            self._start_anew(lease)
        return self.status(ticket_id)

    def orphan(self, ticket_id: TicketId, grace_s: float) -> bool:
        """The reader seems to be gone: let the lease lapse in `grace_s` unless someone renews it.

        Never makes it longer. False when that changes nothing: the ticket is not held, or its lease
        cannot lapse now.
        """
        lease = self._held(ticket_id)
        if lease is None or math.isinf(lease.deadline_s):
            return False
        lease.due_s = min(lease.due_s, self._clock() + grace_s)
        return True

    @contextmanager
    def pinned(self, ticket_id: TicketId) -> Iterator[None]:
        """The owner looks at the KV: the lease cannot lapse inside the block, and starts anew at its end.

        It can still be released or dropped.
        """
        lease = self._held(ticket_id)
        if lease is None:
            yield
            return
        lease.num_pins += 1
        try:
            yield
        finally:
            lease.num_pins -= 1
            self._start_anew(lease)

    def release(self, ticket_id: TicketId, reader: str) -> Verdict:
        """A reader is done: end the lease and say whether what it read counts. Sticky, idempotent.

        `VALID` only for the first reader that asks, and only when the lease never lapsed, was never
        dropped, and all tokens were ready. Whatever the verdict, the blocks may be freed.
        """
        lease = self._held(ticket_id)
        if lease is not None:
            self._end(ticket_id, _Ending(Verdict.VALID, reader) if lease.is_complete else _EXPIRED)
        if ticket_id in self._leases:  # lapsed, whatever the memory has room for
            return Verdict.EXPIRED
        ending = self._endings.get(ticket_id)
        if ending is None:
            return Verdict.UNKNOWN
        return Verdict.EXPIRED if self.is_fenced(ticket_id, reader) else ending.verdict

    def is_fenced(self, ticket_id: TicketId, reader: str) -> bool:
        """Whether the ticket was `VALID` for another reader, and so can't be for this one."""
        ending = self._endings.get(ticket_id)
        return ending is not None and ending.verdict is Verdict.VALID and ending.reader != reader

    def drop(self, ticket_id: TicketId) -> bool:
        """Give the ticket up, so that a later release says `EXPIRED`. True when it was held until now.

        A verdict that was given before stays.
        """
        if self._held(ticket_id) is None:
            return False
        self._end(ticket_id, _EXPIRED)
        return True

    def expire(self) -> list[TicketId]:
        """Tickets that lapsed since the last call, the first granted first; each is reported once."""
        lapsed = [ticket_id for ticket_id in self._leases if self._held(ticket_id) is None]
        for ticket_id in lapsed:
            del self._leases[ticket_id]
        return lapsed

    def next_deadline(self) -> float | None:
        """Clock time at which `expire` will have something to report; None when nothing can lapse."""
        deadline_s = min((lease.deadline_s for lease in self._leases.values()), default=math.inf)
        return None if math.isinf(deadline_s) else deadline_s

    def assert_idle(self) -> None:
        """Raise `EngineFault` unless every granted ticket was given back."""
        if self._leases:
            raise EngineFault(f"tickets are still held in an idle lease table: {sorted(self._leases)}")

    def _held(self, ticket_id: TicketId) -> _Lease | None:
        """The lease if it holds now; notes the verdict of one that has just lapsed."""
        lease = self._leases.get(ticket_id)
        if lease is None or lease.lapsed:
            return None
        if self._clock() >= lease.deadline_s:
            lease.lapsed = True
            self._remember(ticket_id, _EXPIRED)
            return None
        return lease

    def _start_anew(self, lease: _Lease) -> None:
        lease.due_s = self._clock() + lease.lease_s

    def _end(self, ticket_id: TicketId, ending: _Ending) -> None:
        del self._leases[ticket_id]
        self._remember(ticket_id, ending)

    def _remember(self, ticket_id: TicketId, ending: _Ending) -> None:
        self._endings[ticket_id] = ending
        if len(self._endings) > self._max_verdicts:
            self._endings.popitem(last=False)
