"""What goes wrong with the next read of a loopback network? For tests that need a transport to fail."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """How a read goes wrong."""

    FAIL = "fail"
    """Half of the blocks are copied, then the read is FAILED."""
    STALL = "stall"
    """PENDING until `FaultPlan.resume`, then the read takes place."""
    DELAY = "delay"
    """PENDING for some polls, then the read takes place."""
    CORRUPT = "corrupt"
    """DONE, but one byte is wrong: no transport tells, only a check of the content can."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One read's fate."""

    kind: FaultKind
    num_polls: int = 0
    """How long a DELAY lasts."""
    number: int = 0
    """Counts the plan's faults, so that `is_stalled` knows which one is asked about."""


class FaultPlan:
    """Scripted faults first, in order; then random ones at the given rates. Pure, seeded."""

    def __init__(self, rates: Mapping[FaultKind, float] | None = None, seed: int = 0) -> None:
        """`rates` are the probabilities per read; what is left to 1 is a read without fault."""
        self._rates = dict(rates or {})
        total = sum(self._rates.values())
        if min(self._rates.values(), default=0.0) < 0 or total > 1:
            raise ValueError(f"fault rates must be between 0 and 1 in sum, not {self._rates}")
        self._random = random.Random(seed)
        self._script: deque[Fault | None] = deque()
        self._num_taken = 0
        self._num_resumed = 0

    def script(self, kind: FaultKind | None, num_polls: int = 1) -> None:
        """Append the fate of one read; None is a read without fault."""
        self._script.append(None if kind is None else Fault(kind, num_polls))

    def take(self) -> Fault | None:
        """The fate of the read that starts now."""
        fault = self._script.popleft() if self._script else self._draw()
        if fault is None:
            return None
        self._num_taken += 1
        return Fault(fault.kind, fault.num_polls, self._num_taken)

    def resume(self) -> None:
        """Let all reads go on that are stalled now; later ones stall anew."""
        self._num_resumed = self._num_taken

    def is_stalled(self, fault: Fault) -> bool:
        return fault.kind is FaultKind.STALL and fault.number > self._num_resumed

    def corrupt_byte(self, block_bytes: int) -> int:
        """Offset of the byte that a CORRUPT read spoils."""
        return self._random.randrange(block_bytes)

    def _draw(self) -> Fault | None:
        draw = self._random.random()
        for kind, rate in self._rates.items():
            if draw < rate:
                return Fault(kind, num_polls=self._random.randint(1, 5))
            draw -= rate
        return None
