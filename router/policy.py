"""Which worker gets a request: small pure classes over loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from protocol.ids import Role
from router.ports import Candidate

C = TypeVar("C", bound=Candidate)


class RoutingPolicy(Protocol):
    """Chooses one of the candidates; holds no request and blocks nobody."""

    def choose(self, role: Role, candidates: Sequence[C]) -> C:
        """One of `candidates`, of which there is at least one."""


class LeastOutstandingWork:
    """The worker with the least work before it: tokens to compute for prefill, sequences for decode.

    A reported load lags by a frame and a burst arrives within one, so that what this router has
    outstanding is added to it. Counting own work twice once it is reported weighs all workers alike.
    Ties go to the worker with more free blocks, then to the one that waited longest for a request.
    """

    def choose(self, role: Role, candidates: Sequence[C]) -> C:
        work = _tokens_ahead if role is Role.PREFILL else _sequences_ahead
        return min(candidates, key=lambda c: (work(c), -c.load.blocks_free, c.last_assigned))


def _tokens_ahead(candidate: Candidate) -> int:
    return candidate.load.num_waiting_tokens + candidate.outstanding_tokens


def _sequences_ahead(candidate: Candidate) -> int:
    load = candidate.load
    return load.num_running + load.num_waiting + load.num_held + candidate.num_outstanding
