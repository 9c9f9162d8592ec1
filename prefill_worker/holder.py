"""Which blocks may readers read, and until when?

    offer ──> computing ──all ready──> HELD ──release by a reader──> VALID, blocks free
                  │                     │ ^── renew
                  │                     ├── drop by the router, a fault, the end ──> EXPIRED, blocks free
                  │                     └── lease lapsed ──> EXPIRED, blocks free at the next look
                  └── release, drop ──> EXPIRED, blocks free

Every offered ticket leaves by exactly one of these, and takes its sequence out of the engine. A reader
waits for progress inside `renew`; when that call breaks and nobody else is there, the lease is cut short.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from kv_transfer import LeaseTable
from prefill_worker.attendance import Attendance
from prefill_worker.checksums import Checksum, Checksums
from prefill_worker.metrics import PrefillMetrics
from protocol.errors import InvalidRequest, LayoutMismatch
from protocol.handoff import NOT_HELD, LeaseStatus, Released, Ticket, Verdict
from protocol.ids import BlockId, RequestId, SequenceId, TicketId, WorkerIdentity
from protocol.ports import Clock

_log = logging.getLogger(__name__)

MAX_EXPIRY_PERIOD_S = 0.5
MIN_EXPIRY_PERIOD_S = 0.005
MAX_RENEW_WAIT_S = 5.0
ORPHAN_GRACE_S = 1.0
"""How long a complete prefill stays when its reader seems to have died: time for the router to notice the
same, and to offer the ticket to another one."""


@dataclass(frozen=True, slots=True)
class _Held:
    request_id: RequestId
    seq_id: SequenceId
    block_ids: tuple[BlockId, ...]
    on_end: Callable[[], None]
    attendance: Attendance = field(default_factory=Attendance)


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
        checksum: Checksum | None = None,
    ) -> None:
        """`release_sequence` frees the blocks of a sequence whose ticket has ended."""
        self._identity = identity
        self._address = address
        self._block_size = block_size
        self._lease_s = lease_s
        self._release_sequence = release_sequence
        self._metrics = metrics
        self._clock = clock
        self._checksums = None if checksum is None else Checksums(checksum)
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
        on_end: Callable[[], None],
    ) -> Ticket:
        """Put a sequence whose blocks are allocated under a lease, and write its ticket.

        `on_end` is called once, when the ticket has ended, however it did.
        """
        ticket_id = TicketId(uuid.uuid4().hex)
        blocks = tuple(block_ids[: -(-num_tokens // self._block_size)])
        self._leases.grant(ticket_id, self._lease_s, num_tokens=num_tokens, tokens_ready=tokens_ready)
        self._held[ticket_id] = _Held(request_id, seq_id, blocks, on_end)
        self._ticket_of_request[request_id] = ticket_id
        self._metrics.observe_grant(is_early=tokens_ready < num_tokens)
        return Ticket(
            ticket_id=ticket_id,
            owner=self._identity,
            owner_address=self._address(),
            block_ids=blocks,
            num_tokens=num_tokens,
            tokens_ready=tokens_ready,
            lease_s=self._lease_s,
        )

    def progress(self, ticket_id: TicketId, tokens_ready: int) -> None:
        """More tokens' KV may be read: tell who waits. With the last one the lease's time starts."""
        if self._leases.progress(ticket_id, tokens_ready):
            self._held[ticket_id].attendance.wake()

    async def renew(
        self, incarnation: str, ticket_id: TicketId, tokens_known: int = 0, wait_s: float = 0.0
    ) -> LeaseStatus:
        """A reader is still interested. `incarnation` is the owner's, as the ticket named it.

        Answers when more than `tokens_known` tokens are ready, or the lease is lost, or after `wait_s`
        (bounded). Cancelled when the reader does not wait any more: see `ORPHAN_GRACE_S`.
        """
        held = self._held.get(ticket_id)
        if held is None or incarnation != self._identity.incarnation:
            return NOT_HELD
        with held.attendance.call(lambda: self._orphan(ticket_id)):
            if wait_s > 0 and self._knows_all(ticket_id, tokens_known):
                self._leases.renew(ticket_id)
                limit_s = min(wait_s, self._lease_s / 3, MAX_RENEW_WAIT_S)
                with self._metrics.waiting_reader():
                    await held.attendance.wait(
                        lambda: not self._knows_all(ticket_id, tokens_known), limit_s
                    )
            return self._leases.renew(ticket_id)

    async def release(
        self, incarnation: str, ticket_id: TicketId, reader: str, *, wants_checksums: bool = False
    ) -> Released:
        """A reader is done; the answer says whether what it read counts. Sticky, idempotent.

        VALID for the first reader alone. Raises `InvalidRequest` without a reader's name, and
        `LayoutMismatch` when checksums are wanted that this worker does not compute; the ticket stays.
        """
        if not reader:
            raise InvalidRequest("a release has to name its reader")
        if incarnation != self._identity.incarnation:
            return Released(Verdict.UNKNOWN)
        if not wants_checksums:
            return Released(self._release(ticket_id, reader))
        if self._checksums is None:
            raise LayoutMismatch(
                f"{self._identity.worker_id} computes no checksums, its reader wants them: set"
                " kv_transfer.checksum alike on all workers"
            )
        checksums = await self._compute_checksums(self._checksums, ticket_id)
        verdict = self._release(ticket_id, reader)
        if verdict is not Verdict.VALID:
            return Released(verdict)
        self._checksums.remember(ticket_id, checksums)
        return Released(verdict, self._checksums.told(ticket_id))

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

    def _knows_all(self, ticket_id: TicketId, tokens_known: int) -> bool:
        """Whether there is nothing to tell a reader of this ticket."""
        status = self._leases.status(ticket_id)
        return status.held and status.tokens_ready <= tokens_known

    async def _compute_checksums(self, checksums: Checksums, ticket_id: TicketId) -> tuple[int, ...]:
        """Of a ticket's blocks while the lease holds; empty when a release cannot be VALID anyway."""
        held = self._held.get(ticket_id)
        if held is None or not self._leases.is_complete(ticket_id):
            return ()
        with held.attendance.call(lambda: self._orphan(ticket_id)), self._leases.pinned(ticket_id):
            return await checksums.compute(held.block_ids)

    def _release(self, ticket_id: TicketId, reader: str) -> Verdict:
        verdict = self._leases.release(ticket_id, reader)
        self._metrics.observe_verdict(verdict)
        if self._leases.is_fenced(ticket_id, reader):
            self._metrics.observe_fenced_reader()
        self.expire()  # frees, and counts, the ticket that comes too late
        self._let_go(ticket_id)
        return verdict

    def _orphan(self, ticket_id: TicketId) -> None:
        if self._leases.orphan(ticket_id, ORPHAN_GRACE_S):
            self._metrics.observe_orphan()
            _log.info("%s lost its reader", self._held[ticket_id].request_id)

    def _let_go(self, ticket_id: TicketId) -> None:
        held = self._held.pop(ticket_id, None)
        if held is None:
            return
        if self._ticket_of_request.get(held.request_id) == ticket_id:
            del self._ticket_of_request[held.request_id]
        held.attendance.wake()
        self._release_sequence(held.seq_id)
        held.on_end()
