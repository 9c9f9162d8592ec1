"""The seams between the router's logic and the workers: small protocols.

The real implementations are in `links` (requests and frames) and `workers` (who is there); the fakes
that ship are in `scripted`. Everything here is used by the event loop's thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from protocol.generation import GenerationRequest, Token, TokenDelta
from protocol.handoff import Fingerprint, Ticket
from protocol.ids import Role, TicketId, WorkerIdentity
from protocol.membership import Load


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a prefill came to."""

    first: TokenDelta
    """Exactly one token."""
    ticket: Ticket | None
    """For the prompt's KV; None when the first token ended the request."""


class PrefillClient(Protocol):
    """One prefill worker."""

    async def prefill(self, request: GenerationRequest) -> Prefilled:
        """Compute the prompt and sample one token. Cancelling aborts it there, ticket included.

        Raises what the worker raised, or `WorkerUnavailable` when the worker is lost.
        """

    def release(self, ticket_id: TicketId) -> None:
        """Tell the owner that nobody will read this ticket (any more). Never blocks or raises."""


class TokenStream(Protocol):
    """The deltas of one request at one decode worker, in order."""

    async def next(self) -> TokenDelta:
        """The next delta; nothing may be asked for after one with a `finish_reason`.

        Raises what the worker raised, or `WorkerUnavailable` when the worker is lost; deltas that
        had arrived before are given first.
        """

    def close(self) -> None:
        """Abort the request unless it has ended. Idempotent; never blocks or raises."""


class DecodeClient(Protocol):
    """One decode worker."""

    def decode(self, request: GenerationRequest, ticket: Ticket, first_token: Token) -> TokenStream:
        """Submit at once; the worker owns the ticket from here. Raises `WorkerUnavailable`."""


class Candidate(Protocol):
    """What a routing policy may know about a worker."""

    @property
    def load(self) -> Load:
        """As of the worker's last frame: it lags, and it counts the requests of all routers."""

    @property
    def num_outstanding(self) -> int:
        """Requests that this router has there now."""

    @property
    def outstanding_tokens(self) -> int:
        """Tokens of prompt and output of those requests."""

    @property
    def last_assigned(self) -> int:
        """Grows with every assignment in the router; for breaking ties in turn."""


class Worker(Candidate, Protocol):
    """A worker that can take requests, as the orchestrator sees it."""

    @property
    def identity(self) -> WorkerIdentity: ...

    @property
    def fingerprint(self) -> Fingerprint: ...

    def assign(self, num_tokens: int) -> None:
        """Count a request of `num_tokens` tokens as outstanding here."""

    def unassign(self, num_tokens: int) -> None:
        """Take it off again."""


class PrefillWorker(Worker, Protocol):
    """A usable prefill worker."""

    @property
    def client(self) -> PrefillClient: ...


class DecodeWorker(Worker, Protocol):
    """A usable decode worker."""

    @property
    def client(self) -> DecodeClient: ...


class Workers(Protocol):
    """Who can take requests now."""

    def prefill_workers(self) -> Sequence[PrefillWorker]:
        """Connected, not draining, in a stable order."""

    def decode_workers(self) -> Sequence[DecodeWorker]:
        """Connected, not draining, in a stable order."""

    async def changed(self) -> None:
        """Return after the next change of either list. Wait for it under a time limit."""


def num_usable(workers: Workers, role: Role) -> int:
    """How many workers of a role can take requests now."""
    return len(workers.prefill_workers() if role is Role.PREFILL else workers.decode_workers())
