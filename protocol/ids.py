"""The identifiers of the system, each a type of its own so that they cannot be swapped unnoticed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

RequestId = NewType("RequestId", str)
"""What the client asked; minted by the router, unique in a cluster."""

SequenceId = NewType("SequenceId", str)
"""One request's state in one engine. Unique in that engine for as long as the engine lives."""

TicketId = NewType("TicketId", str)
"""A right to read held KV blocks; minted by the owner, never used twice."""

WorkerId = NewType("WorkerId", str)
"""The name of a worker; a restarted worker keeps no name."""

BlockId = NewType("BlockId", int)
"""Index of a block in one rank's KV pool. 0 is the null block and is never handed out."""

HostBlockId = NewType("HostBlockId", int)
"""Index of a block in the host pool, to which preempted sequences are swapped; 0 is like any other."""


class Role(StrEnum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Who a worker is: the same `worker_id` with another `incarnation` is another worker."""

    worker_id: WorkerId
    incarnation: str

    def __str__(self) -> str:
        return f"{self.worker_id}@{self.incarnation}"
