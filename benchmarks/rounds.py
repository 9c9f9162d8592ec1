"""How often is something measured? As often as the time allows that it may take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Rounds:
    """`most` rounds, or fewer where the machine is too busy for them."""

    most: int
    budget_s: float
    least: int = 1

    def __iter__(self) -> Iterator[int]:
        """The time runs from here on."""
        until_s = time.monotonic() + self.budget_s
        for i in range(self.most):
            if i >= self.least and time.monotonic() > until_s:
                return
            yield i
