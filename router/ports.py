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

    firsts: tuple[TokenDelta, ...]
    """Exactly one token for every choice, in their order."""
    ticket: Ticket | None
    """For the prompt's KV; None when the first tokens ended all choices."""
    prompt_logprobs: tuple[Token, ...] = ()
    """The prompt's tokens but the first, where the request asks for their log-probabilities."""

    @property
    def open_choices(self) -> list[tuple[int, Token]]:
        """Those that go on, with their first tokens."""
        return [(first.index, first.tokens[0]) for first in self.firsts if first.finish_reason is None]


class PrefillClient(Protocol):
    """One prefill worker."""

    async def prefill(self, request: GenerationRequest) -> Prefilled:
        """Compute the prompt and sample a token per choice. Cancelling aborts it there, ticket included.

        Raises what the worker raised, or `WorkerUnavailable` when the worker is lost.
        """

    def release(self, ticket_id: TicketId) -> None:
        """Tell the owner that nobody will read this ticket (any more). Never blocks or raises."""


class TokenStream(Protocol):
    """The deltas of one request at one decode worker, in order."""

    async def next(self) -> TokenDelta:
        """The next delta; nothing may be asked for once all choices have ended.

        Raises what the worker raised, or `WorkerUnavailable` when the worker is lost; deltas that
        had arrived before are given first.
        """

    def drop(self, index: int) -> None:
        """Abort one choice unless it has ended; the others go on. Idempotent; never blocks or raises."""

    def close(self) -> None:
        """Abort the request unless it has ended. Idempotent; never blocks or raises."""


class DecodeClient(Protocol):
    """One decode worker."""

    def decode(
        self, request: GenerationRequest, ticket: Ticket, first_tokens: Sequence[tuple[int, Token]]
    ) -> TokenStream:
        """Submit the choices that go on, with their first tokens; the worker owns the ticket from here.

        Raises `WorkerUnavailable`.
        """


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

    @property
    def advanced_at(self) -> float | None:
        """When it last showed that it gets on with its work, anybody's; by the router's clock."""

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
