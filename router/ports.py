"""The seams between the router's logic and the workers: small protocols.

The real implementations are in `prefill_link` and `decode_link` (requests and frames) and `workers` (who
is there); the fakes that ship are in `scripted`. Everything here is used by the event loop's thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from protocol.errors import SplitserveError
from protocol.generation import GenerationRequest, Token, TokenDelta
from protocol.handoff import Fingerprint, Ticket
from protocol.ids import Role, WorkerIdentity
from protocol.membership import Load
from router.credit import CreditAccount, CreditQueue, Reservation
from router.prefix_memory import PrefixMemory


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a prefill came to."""

    firsts: tuple[TokenDelta, ...]
    """Exactly one token for every choice, in their order."""
    prompt_logprobs: tuple[Token, ...] = ()
    """The prompt's tokens but the first, where the request asks for their log-probabilities."""

    @property
    def open_choices(self) -> list[tuple[int, Token]]:
        """Those that go on, with their first tokens. The worker holds the ticket for them."""
        return [(first.index, first.tokens[0]) for first in self.firsts if first.finish_reason is None]


class PrefillRun(Protocol):
    """One prompt that a prefill worker computes. One consumer; `close` it in every case."""

    async def ticket(self) -> Ticket:
        """The right to read the prompt's KV, as soon as its blocks are allocated.

        Raises what the worker raised, or `WorkerUnavailable` when the worker is lost.
        """

    async def done(self) -> Prefilled:
        """The first tokens. Raises as `ticket` does."""

    def taken(self) -> None:
        """A decode worker has the KV now, or needs it no more: the ticket is used up."""

    def close(self) -> None:
        """Abort what is still computed, and give a ticket back that was not taken.

        Idempotent; never blocks or raises.
        """


class PrefillClient(Protocol):
    """One prefill worker."""

    def prefill(self, request: GenerationRequest) -> PrefillRun:
        """Submit a prompt. Raises `WorkerUnavailable`."""


class TokenStream(Protocol):
    """The deltas of one request at one decode worker, in order."""

    def begin(self, first_tokens: Sequence[tuple[int, Token]]) -> None:
        """Tell the choices that go on, with the tokens that their prefill worker sampled.

        Once, for a stream with a ticket; no delta comes before it. Never blocks or raises.
        """

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

    @property
    def credit(self) -> CreditAccount:
        """What may still be handed to it."""

    def decode(
        self, request: GenerationRequest, ticket: Ticket | None, reservation: Reservation
    ) -> TokenStream:
        """Submit a request on credit that was reserved here.

        With a ticket the worker reads the prompt's KV, and waits for `begin`; without one it computes
        the prompt itself, and the first tokens are deltas like the others. Raises `WorkerUnavailable`.
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

    @property
    def prefixes(self) -> PrefixMemory:
        """What it was sent."""


class Workers(Protocol):
    """Who can take requests now."""

    def prefill_workers(self) -> Sequence[PrefillWorker]:
        """Connected, not draining, in a stable order."""

    def decode_workers(self) -> Sequence[DecodeWorker]:
        """Connected, not draining, in a stable order."""

    @property
    def credits(self) -> CreditQueue:
        """Where to wait for the credit of a decode worker; woken whenever there may be more of it."""

    @property
    def prefill_absent_since(self) -> float | None:
        """Since when there is no prefill worker, by the router's clock; None while there is one."""

    async def changed(self) -> None:
        """Return after the next change of either list. Wait for it under a time limit.

        Raises `WorkerUnavailable` when the router stops.
        """


def num_usable(workers: Workers, role: Role) -> int:
    """How many workers of a role can take requests now."""
    return len(workers.prefill_workers() if role is Role.PREFILL else workers.decode_workers())


class LocalReason(StrEnum):
    """Why a decode worker computes a prompt itself."""

    SHORT = "short"
    """What it does not have cached costs less than a hand-off."""
    NO_PREFILL_WORKER = "no_prefill_worker"
    NO_PAIR = "no_pair"
    """No prefill worker's KV is of use to any decode worker: versions mix in a rolling update."""
    PREFILL_FAILED = "prefill_failed"
    """Every prefill worker there is has let this request down."""


class LegObserver(Protocol):
    """Is told what happens to requests between the workers, for metrics. Never raises."""

    def retried(self, error: SplitserveError) -> None:
        """A request gets another leg after this failure."""

    def resumed(self) -> None:
        """A leg begins whose client has tokens already."""

    def reoffered(self) -> None:
        """A ticket goes to another decode worker, the first one is lost."""

    def computed_locally(self, reason: LocalReason) -> None:
        """A prompt goes to a decode worker without a ticket."""

    def waited_for_credit(self, seconds: float) -> None:
        """A leg could not start at once, for want of credit."""

    def handed_over(self, seconds: float) -> None:
        """From the first tokens until the first delta of the decode worker."""
