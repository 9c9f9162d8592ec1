"""What does a leg hold at its workers while it runs?"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.generation import GenerationRequest
from protocol.handoff import Ticket
from router.ports import DecodeWorker, LocalReason, PrefillWorker, TokenStream


class Seat:
    """One submission's share of a decode worker: credit, and its work in the eyes of the policy.

    Whoever has it releases it in every case.
    """

    def __init__(self, worker: DecodeWorker, leg: GenerationRequest) -> None:
        """`can_seat` has said that there is credit."""
        self.worker = worker
        self._reservation = worker.client.credit.reserve(leg.num_blocks(worker.fingerprint.block_size))
        self._num_tokens = leg.num_tokens
        self._is_taken = True
        worker.assign(self._num_tokens)

    def submit(self, request: GenerationRequest, ticket: Ticket | None) -> TokenStream:
        """Once. Raises `WorkerUnavailable`."""
        return self.worker.client.decode(request, ticket, self._reservation)

    def release(self) -> None:
        """Idempotent."""
        if self._is_taken:
            self._is_taken = False
            self.worker.unassign(self._num_tokens)
            self._reservation.release()

    def __enter__(self) -> None:
        """Released at the end of the body, if it was not before."""

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class Local:
    """A decode worker computes the prompt, too."""

    seat: Seat
    reason: LocalReason


@dataclass(frozen=True, slots=True)
class Paired:
    """A prefill worker computes the prompt, a decode worker takes its KV over."""

    owner: PrefillWorker
    seat: Seat


@dataclass(frozen=True, slots=True)
class Alone:
    """A prefill worker's first tokens are the last ones."""

    owner: PrefillWorker


Place = Local | Paired | Alone


def can_seat(worker: DecodeWorker, leg: GenerationRequest) -> bool:
    """Whether the worker has credit for the leg, or is to refuse it: more than its pool it never has."""
    load = worker.load
    is_idle = not (load.num_running or load.num_waiting or load.num_held)
    num_blocks = leg.num_blocks(worker.fingerprint.block_size)
    never_fits = load.blocks_total and num_blocks > load.blocks_total
    return never_fits or worker.client.credit.covers(num_blocks, is_idle=is_idle)
