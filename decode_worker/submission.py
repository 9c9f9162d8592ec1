"""What does a router hand to a decode worker, and can its parts belong together?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.generation import GenerationRequest
from protocol.handoff import Ticket


@dataclass(frozen=True, slots=True)
class Submission:
    """A request whose prompt another worker computes."""

    request: GenerationRequest
    ticket: Ticket

    def mismatch(self) -> str | None:
        """Why ticket and request cannot belong together; None when they can."""
        num_tokens, ticket = self.request.num_tokens, self.ticket
        if ticket.num_tokens != num_tokens:
            return f"the ticket covers {ticket.num_tokens} tokens and the request has {num_tokens}"
        if ticket.tokens_ready > num_tokens:
            return f"{ticket.tokens_ready} of the ticket's {num_tokens} tokens are ready"
        if not ticket.lease_s > 0:
            return f"the ticket's lease is {ticket.lease_s} s"
        return None


def choices_mismatch(request: GenerationRequest, choices: Sequence[int]) -> str | None:
    """Why first tokens of these choices cannot be the request's; None when they can."""
    first = request.index
    if not choices or list(choices) != sorted(set(choices) & set(range(first, first + request.n))):
        return f"first tokens came for choices {list(choices)} of {request.n} from {first} on"
    return None
