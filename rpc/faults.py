"""What can go wrong with a call between two processes, and how often shall it? Data; `faulty_channel` acts.

A stream is one connection: its messages arrive once and in order, or no more at all. So a stream can be
late, silent or broken, but no message of it is lost alone, or comes twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from protocol.faults import DEFAULT_MAX_DELAY_S, FaultPlan, check_rates
from protocol.wire import splitserve_pb2 as pb


class CallFaultKind(StrEnum):
    """How a call goes wrong, or a message of a stream in either direction."""

    DROP = "drop"
    """It is never answered; the peer does not see it. A stream is silent from then on, both ways."""
    LOSE_REPLY = "lose_reply"
    """The peer does what it is asked, but its answer never comes. Calls only."""
    DELAY = "delay"
    """It leaves late; what comes behind it on a stream waits for it."""
    DUPLICATE = "duplicate"
    """The peer gets it twice, at the same time. Calls only."""
    DISCONNECT = "disconnect"
    """UNAVAILABLE at once. A stream ends."""


CallPlan = FaultPlan[CallFaultKind]

_OF_CALLS_ONLY = frozenset({CallFaultKind.LOSE_REPLY, CallFaultKind.DUPLICATE})


@dataclass(frozen=True, slots=True)
class CallFaults:
    """How the calls of a process go wrong: what a configuration says."""

    rates: Mapping[str, Mapping[CallFaultKind, float]] = field(default_factory=dict)
    """By method, such as Renew or Serve: the probability per call, per message where it is a stream.
    Their sum is at most 1 for each."""
    seed: int | str = 0
    max_delay_s: float = DEFAULT_MAX_DELAY_S
    """A DELAY lasts up to this long."""

    def __post_init__(self) -> None:
        """Raises `ValueError` for methods that do not exist, and for faults that cannot be."""
        is_stream = _streaming_by_method()
        for method, rates in self.rates.items():
            if method not in is_stream:
                raise ValueError(f"there is no method {method!r}, only {', '.join(sorted(is_stream))}")
            check_rates(rates)
            impossible = _OF_CALLS_ONLY & rates.keys() if is_stream[method] else ()
            if impossible:
                raise ValueError(f"{method} is a stream, which knows no {', '.join(sorted(impossible))}")

    def plans(self, caller: str) -> dict[str, CallPlan]:
        """A plan for every method there is; each `caller` has fates of its own, the same in every run."""
        return {
            method: FaultPlan(
                self.rates.get(method, {}),
                seed=f"{self.seed}/{caller}/{method}",
                max_delay_s=self.max_delay_s,
            )
            for method in _streaming_by_method()
        }


def _streaming_by_method() -> dict[str, bool]:
    return {
        method.name: bool(method.client_streaming or method.server_streaming)
        for service in pb.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
