"""What can go wrong with a read of KV blocks, and how often shall it? Data; `faulty` makes it happen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from protocol.faults import DEFAULT_MAX_DELAY_S, FaultPlan, check_rates


class FaultKind(StrEnum):
    """How a read goes wrong."""

    REFUSE = "refuse"
    """It cannot be started, and no block is touched."""
    FAIL = "fail"
    """Half of the blocks are read, then it is FAILED."""
    TRUNCATE = "truncate"
    """Half of the blocks are read, yet it is DONE: only a checksum tells."""
    BIT_FLIP = "bit_flip"
    """All is read and it is DONE, but one bit is wrong: only a checksum tells."""
    STALL = "stall"
    """PENDING until `FaultPlan.resume`, which only tests call; then the read takes place."""
    DELAY = "delay"
    """PENDING for a while, then the read takes place."""
    DISCONNECT = "disconnect"
    """The peer is gone: this read FAILS, and later ones are refused until it is connected anew."""


@dataclass(frozen=True, slots=True)
class ReadFaults:
    """How the reads of a worker go wrong: what a configuration says."""

    rates: Mapping[FaultKind, float] = field(default_factory=dict)
    """Probability per read; their sum is at most 1."""
    seed: int | str = 0
    max_delay_s: float = DEFAULT_MAX_DELAY_S
    """A DELAY lasts up to this long."""

    def __post_init__(self) -> None:
        check_rates(self.rates)

    def plan(self, agent: str) -> FaultPlan[FaultKind]:
        """The plan of one transport agent: each has fates of its own, the same in every run."""
        return FaultPlan(self.rates, seed=f"{self.seed}/{agent}", max_delay_s=self.max_delay_s)
