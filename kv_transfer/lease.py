"""Does a held prompt's KV still belong to its ticket? The owner's book of leases.

    grant --> HELD --release, all tokens ready--> VALID     the caller frees the blocks now
                |----release, prefill unfinished-> EXPIRED  the caller frees the blocks now
                |----drop------------------------> EXPIRED  the caller frees the blocks now
                \\----deadline passed-------------> EXPIRED  `expire` reports it once; the caller frees then

Verdicts are remembered up to a count, the oldest forgotten first: a forgotten ticket is `UNKNOWN`,
which readers treat like `EXPIRED`. The clock is asked at every call, so a lapse counts from its moment
on, whether or not `expire` has run since.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from protocol.errors import EngineFault
from protocol.handoff import LeaseStatus, Verdict
from protocol.ids import TicketId
from protocol.ports import Clock

MAX_VERDICTS = 100_000
"""Far more than the tickets of any time span in which a reader still asks again; about 20 MB."""


@dataclass(slots=True)
class _Lease:
    lease_s: float
    deadline: float
    num_tokens: int
    tokens_ready: int
    lapsed: bool = False
    """True: the verdict is EXPIRED already, and `expire` has yet to report the ticket."""


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
        self._verdicts: OrderedDict[TicketId, Verdict] = OrderedDict()

    @property
    def num_held(self) -> int:
        """Tickets whose blocks have not been given back, those that `expire` will report included."""
        return len(self._leases)

    def grant(self, ticket_id: TicketId, lease_s: float, num_tokens: int, tokens_ready: int = 0) -> None:
        """Start a lease of `lease_s` seconds on the KV of `num_tokens` tokens.

        Raises `ValueError` for a ticket id that was used before, or a lease that cannot hold.
        """
        if ticket_id in self._leases or ticket_id in self._verdicts:
            raise ValueError(f"ticket {ticket_id} was granted before")
        if not lease_s > 0:
            raise ValueError(f"a lease needs more than {lease_s} seconds")
        if not 0 <= tokens_ready <= num_tokens:
            raise ValueError(f"{tokens_ready} of {num_tokens} tokens cannot be ready")
        self._leases[ticket_id] = _Lease(lease_s, self._clock() + lease_s, num_tokens, tokens_ready)

    def progress(self, ticket_id: TicketId, tokens_ready: int) -> None:
        """Note that the KV of the first `tokens_ready` tokens is complete. Never goes back.

        A ticket that is not held is ignored: the prefill raced with the lease's end. Raises
        `ValueError` for more tokens than were granted.
        """
        lease = self._held(ticket_id)
        if lease is None:
            return
        if tokens_ready > lease.num_tokens:
            raise ValueError(f"{tokens_ready} tokens ready of a ticket for {lease.num_tokens}")
        lease.tokens_ready = max(lease.tokens_ready, tokens_ready)

    def renew(self, ticket_id: TicketId) -> LeaseStatus:
        """Start the lease's time anew, if it still holds."""
        lease = self._held(ticket_id)
        if lease is None:
            return LeaseStatus(held=False, tokens_ready=0, lease_s=0.0)
        lease.deadline = self._clock() + lease.lease_s
        return LeaseStatus(held=True, tokens_ready=lease.tokens_ready, lease_s=lease.lease_s)

    def release(self, ticket_id: TicketId) -> Verdict:
        """The reader is done: end the lease and say whether what it read counts. Sticky, idempotent.

        `VALID` only when the lease never lapsed, was never dropped, and all tokens were ready. Whatever
        the verdict, the blocks may be freed.
        """
        lease = self._held(ticket_id)
        if lease is not None:
            is_complete = lease.tokens_ready == lease.num_tokens
            self._end(ticket_id, Verdict.VALID if is_complete else Verdict.EXPIRED)
        return self._verdict(ticket_id)

    def drop(self, ticket_id: TicketId) -> bool:
        """Give the ticket up, so that a later release says `EXPIRED`. True when it was held until now.

        A verdict that was given before stays.
        """
        if self._held(ticket_id) is None:
            return False
        self._end(ticket_id, Verdict.EXPIRED)
        return True

    def expire(self) -> list[TicketId]:
        """Tickets that lapsed since the last call, the first granted first; each is reported once."""
        lapsed = [ticket_id for ticket_id in self._leases if self._held(ticket_id) is None]
        for ticket_id in lapsed:
            del self._leases[ticket_id]
        return lapsed

    def next_deadline(self) -> float | None:
        """Clock time at which `expire` will have something to report; None when nothing is held."""
        return min((lease.deadline for lease in self._leases.values()), default=None)

    def assert_idle(self) -> None:
        """Raise `EngineFault` unless every granted ticket was given back."""
        if self._leases:
            raise EngineFault(f"tickets are still held in an idle lease table: {sorted(self._leases)}")

    def _held(self, ticket_id: TicketId) -> _Lease | None:
        """The lease if it holds now; notes the verdict of one that has just lapsed."""
        lease = self._leases.get(ticket_id)
        if lease is None or lease.lapsed:
            return None
        if self._clock() >= lease.deadline:
            lease.lapsed = True
            self._remember(ticket_id, Verdict.EXPIRED)
            return None
        return lease

    def _end(self, ticket_id: TicketId, verdict: Verdict) -> None:
        del self._leases[ticket_id]
        self._remember(ticket_id, verdict)

    def _verdict(self, ticket_id: TicketId) -> Verdict:
        if ticket_id in self._leases:  # lapsed, whatever the memory has room for
            return Verdict.EXPIRED
        return self._verdicts.get(ticket_id, Verdict.UNKNOWN)

    def _remember(self, ticket_id: TicketId, verdict: Verdict) -> None:
        self._verdicts[ticket_id] = verdict
        if len(self._verdicts) > self._max_verdicts:
            self._verdicts.popitem(last=False)
