"""What goes wrong next? Decided by a plan: scripted by a test, or drawn at rates from a seed.

The wrappers that make it go wrong are beside what they wrap: `kv_transfer.faulty`, `rpc.faulty_channel`.
They ship, so that a whole cluster can be tried under fire; without them nothing here is ever asked.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

KindT = TypeVar("KindT", bound=StrEnum)

DEFAULT_MAX_DELAY_S = 0.5


@dataclass(frozen=True, slots=True)
class Fault(Generic[KindT]):
    """The fate of one read, one call or one message."""

    kind: KindT
    delay_s: float = 0.0
    """For the kinds that make it late: by how much."""
    number: int = 0
    """Counts the plan's faults, so that `is_resumed` knows which one is asked about."""


class FaultPlan(Generic[KindT]):
    """Scripted fates first, in order; then random ones at the given rates. Pure; one thread asks it."""

    def __init__(
        self,
        rates: Mapping[KindT, float] | None = None,
        *,
        seed: int | str = 0,
        max_delay_s: float = DEFAULT_MAX_DELAY_S,
    ) -> None:
        """`rates` are probabilities per question; what is left to 1 has no fault.

        Equal seeds give equal fates. Raises `ValueError` for rates that cannot be.
        """
        self._rates = dict(rates or {})
        check_rates(self._rates)
        self._max_delay_s = max_delay_s
        self._random = random.Random(seed)
        self._script: deque[Fault[KindT] | None] = deque()
        self._num_taken = 0
        self._num_resumed = 0

    def script(self, kind: KindT | None, delay_s: float = 0.0) -> None:
        """Append one fate; None is one without fault."""
        self._script.append(None if kind is None else Fault(kind, delay_s))

    def take(self) -> Fault[KindT] | None:
        """The fate of what starts now; None when it shall go well."""
        fault = self._script.popleft() if self._script else self._draw()
        if fault is None:
            return None
        self._num_taken += 1
        return Fault(fault.kind, fault.delay_s, self._num_taken)

    def resume(self) -> None:
        """Let all go on that is held now; later ones are held anew."""
        self._num_resumed = self._num_taken

    def is_resumed(self, fault: Fault[KindT]) -> bool:
        return fault.number <= self._num_resumed

    def pick(self, count: int) -> int:
        """A random number in [0, count): which one it hits."""
        return self._random.randrange(count)

    def _draw(self) -> Fault[KindT] | None:
        draw = self._random.random()
        for kind, rate in self._rates.items():
            if draw < rate:
                return Fault(kind, self._random.uniform(0, self._max_delay_s))
            draw -= rate
        return None


def check_rates(rates: Mapping[KindT, float]) -> None:
    """Raise `ValueError` unless these are probabilities of things that exclude each other."""
    if min(rates.values(), default=0.0) < 0 or sum(rates.values()) > 1:
        raise ValueError(f"fault rates must be between 0 and 1 in sum, not {dict(rates)}")
