"""Which blocks are held for readers, and until when?

    offer ──> HELD under a lease ──release by the reader──> VALID, blocks free
                   │  ^── renew                    (EXPIRED when the prefill was not complete)
                   ├── drop by the router, a fault, the end ──> EXPIRED, blocks free
                   └── lease lapsed ──> EXPIRED, blocks free at the next look

Every offered ticket leaves by exactly one of these, and takes its sequence out of the engine.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kv_transfer import LeaseTable
from prefill_worker.metrics import PrefillMetrics
from protocol.handoff import LeaseStatus, Ticket, Verdict
from protocol.ids import BlockId, RequestId, SequenceId, TicketId, WorkerIdentity
from protocol.ports import Clock

MAX_EXPIRY_PERIOD_S = 0.5
MIN_EXPIRY_PERIOD_S = 0.005


@dataclass(frozen=True, slots=True)
class _Held:
    request_id: RequestId
    seq_id: SequenceId


class Holder:
    """The owner's side of all hand-offs of one worker. Used on one event loop."""

    def __init__(
        self,
        *,
        identity: WorkerIdentity,
        address: Callable[[], str],
        block_size: int,
        lease_s: float,
        release_sequence: Callable[[SequenceId], None],
        metrics: PrefillMetrics,
        clock: Clock,
    ) -> None:
        """`release_sequence` frees the blocks of a sequence whose ticket has ended."""
        self._identity = identity
        self._address = address
        self._block_size = block_size
        self._lease_s = lease_s
        self._release_sequence = release_sequence
        self._metrics = metrics
        self._clock = clock
        self._leases = LeaseTable(clock)
        self._held: dict[TicketId, _Held] = {}
        self._ticket_of_request: dict[RequestId, TicketId] = {}

    def __len__(self) -> int:
        return len(self._held)

    def offer(
        self,
        request_id: RequestId,
        seq_id: SequenceId,
        block_ids: Sequence[BlockId],
        *,
        num_tokens: int,
        tokens_ready: int,
    ) -> Ticket:
        """Put a HELD sequence under a lease that starts now, and write its ticket."""
        ticket_id = TicketId(uuid.uuid4().hex)
        self._leases.grant(ticket_id, self._lease_s, num_tokens=num_tokens, tokens_ready=tokens_ready)
        self._held[ticket_id] = _Held(request_id, seq_id)
        self._ticket_of_request[request_id] = ticket_id
        self._metrics.observe_grant()
        num_blocks = -(-num_tokens // self._block_size)
        return Ticket(
            ticket_id=ticket_id,
            owner=self._identity,
            owner_address=self._address(),
            block_ids=tuple(block_ids[:num_blocks]),
            num_tokens=num_tokens,
            tokens_ready=tokens_ready,
            lease_s=self._lease_s,
        )

    def renew(self, incarnation: str, ticket_id: TicketId) -> LeaseStatus:
        """A reader is still interested. `incarnation` is the owner's, as the ticket named it."""
        if incarnation != self._identity.incarnation:
            return LeaseStatus(held=False, tokens_ready=0, lease_s=0.0)
        return self._leases.renew(ticket_id)

    def release(self, incarnation: str, ticket_id: TicketId) -> Verdict:
        """A reader is done; the answer says whether what it read counts. Sticky, idempotent."""
        if incarnation != self._identity.incarnation:
            return Verdict.UNKNOWN
        verdict = self._leases.release(ticket_id)
        self._metrics.observe_verdict(verdict)
        self.expire()  # frees, and counts, the ticket that comes too late
        self._let_go(ticket_id)
        return verdict

    def drop(self, ticket_id: TicketId) -> None:
        """Nobody will read: free the blocks. Idempotent."""
        if self._leases.drop(ticket_id):
            self._let_go(ticket_id)

    def drop_request(self, request_id: RequestId) -> None:
        """Drop the ticket of a request, if one is held. Idempotent."""
        ticket_id = self._ticket_of_request.get(request_id)
        if ticket_id is not None:
            self.drop(ticket_id)

    def drop_sequences(self, seq_ids: Collection[SequenceId]) -> None:
        """Drop the tickets of these sequences, where any are held."""
        for ticket_id, held in list(self._held.items()):
            if held.seq_id in seq_ids:
                self.drop(ticket_id)

    def drop_all(self) -> None:
        for ticket_id in list(self._held):
            self.drop(ticket_id)
        self.expire()

    def expire(self) -> None:
        """Free the blocks of every lease that has lapsed."""
        for ticket_id in self._leases.expire():
            self._metrics.observe_expiry()
            self._let_go(ticket_id)

    async def expire_forever(self) -> None:
        """Look whenever a lease may lapse, and at least twice a second. Runs until cancelled."""
        while True:
            self.expire()
            await asyncio.sleep(self._time_to_next_look())

    def _time_to_next_look(self) -> float:
        deadline_s = self._leases.next_deadline()
        if deadline_s is None:
            return MAX_EXPIRY_PERIOD_S
        return min(max(deadline_s - self._clock(), MIN_EXPIRY_PERIOD_S), MAX_EXPIRY_PERIOD_S)

    def _let_go(self, ticket_id: TicketId) -> None:
        held = self._held.pop(ticket_id, None)
        if held is None:
            return
        if self._ticket_of_request.get(held.request_id) == ticket_id:
            del self._ticket_of_request[held.request_id]
        self._release_sequence(held.seq_id)
