"""The part of the configuration by which things go wrong on purpose."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cluster.config_section import Section

ReadFault = Literal["refuse", "fail", "truncate", "bit_flip", "stall", "delay", "disconnect"]
CallFault = Literal["drop", "lose_reply", "delay", "duplicate", "disconnect"]


class FaultsConfig(Section):
    """What goes wrong on purpose, for tests. Refused unless SPLITSERVE_ALLOW_FAULTS=1 is set."""

    seed: int = 0
    """The same seed gives the same faults, as far as calls and reads come in the same order."""
    max_delay_s: float = Field(default=1.0, gt=0)
    """How late something that is delayed may come."""
    reads: dict[ReadFault, float] = Field(default_factory=dict)
    """Probability per read of KV: refuse, fail, truncate, bit_flip, stall, delay, disconnect."""
    calls: dict[str, dict[CallFault, float]] = Field(default_factory=dict)
    """By method (Serve, Connect, Renew, Release), the probability per call or message: drop, delay,
    disconnect, and for single calls lose_reply and duplicate."""

    @property
    def is_empty(self) -> bool:
        return not self.reads and not self.calls
