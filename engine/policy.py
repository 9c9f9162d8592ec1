"""Who comes first when a step cannot serve everyone, and who makes room?

A policy is one order over sequences, smallest key first. It decides admission from the waiting queue
and preemption: a sequence takes blocks only from those behind it, so the first one always runs on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

from engine.sequence import Sequence

OrderKey = tuple[int, ...]
"""Unique per sequence; must not change while the sequence waits."""


class SchedulingPolicy(Protocol):
    """Pure: looks at sequences, keeps nothing, changes nothing."""

    def key(self, sequence: Sequence) -> OrderKey:
        """Where `sequence` stands; smaller is served first."""


class FirstComeFirstServed:
    """By arrival. A preempted or recomputed sequence so goes before all that came after it."""

    def key(self, sequence: Sequence) -> OrderKey:
        return (sequence.arrival_index,)


POLICIES: Final[Mapping[str, type[SchedulingPolicy]]] = MappingProxyType({"fcfs": FirstComeFirstServed})


def choose_victim(
    policy: SchedulingPolicy, candidates: Iterable[Sequence], beneficiary: Sequence
) -> Sequence | None:
    """Return the last candidate behind `beneficiary`; None when there is none."""
    last = max(candidates, key=policy.key, default=None)
    if last is None or policy.key(last) <= policy.key(beneficiary):
        return None
    return last
