"""What can be set about a prefill worker?"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import StartupError


@dataclass(frozen=True, slots=True)
class PrefillWorkerConfig:
    """Validated at construction. Raises `StartupError`."""

    lease_s: float = 10.0
    """How long held blocks wait for a renewal. Readers renew three times as often."""

    def __post_init__(self) -> None:
        if not self.lease_s > 0:
            raise StartupError(f"lease_s is {self.lease_s}: set it to more than 0 seconds")
