"""Who comes first when a step cannot serve everyone, and who makes room?

A policy is one order over sequences, smallest key first. It decides admission from the waiting queue
and preemption: a sequence takes blocks only from those behind it, so the first one always runs on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

from engine.sequence import Sequence, SequenceState

OrderKey = tuple[int, ...]
"""Unique per sequence; must not change while the sequence waits."""


class SchedulingPolicy(Protocol):
    """Pure: looks at sequences, keeps nothing, changes nothing."""

    preempts_for_arrivals: bool
    """Whether `outranks` is ever true."""

    def key(self, sequence: Sequence) -> OrderKey:
        """Where `sequence` stands; smaller is served first."""

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether `waiting` may take the seat and the blocks of `running`, which is behind it."""


class FirstComeFirstServed:
    """By arrival. A preempted or recomputed sequence so goes before all that came after it."""

    preempts_for_arrivals = False

    def key(self, sequence: Sequence) -> OrderKey:
        return (sequence.arrival_index, sequence.index)

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        return False


class PriorityFirst:
    """By priority, smaller first, those of equal priority by arrival, swapped ones before the others.

    The only policy under which a new arrival preempts. Whoever has a larger priority may starve: that
    is what the client asked for.
    """

    preempts_for_arrivals = True

    def key(self, sequence: Sequence) -> OrderKey:
        is_fresh = sequence.state is not SequenceState.SWAPPED
        return (sequence.priority, is_fresh, sequence.arrival_index, sequence.index)

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        return waiting.priority < running.priority


class ShortestFirst:
    """By the tokens that remain to be computed, prompt and output, plus a handicap per arrival.

    The handicap is the ageing: it grows with the arrival, not with the clock, so that the order of two
    waiting sequences never changes. A sequence with r tokens to do is overtaken only by such as arrive
    less than r / ageing_tokens arrivals later, however many come: so it does not starve.

    The smallest key falls with every step until its sequence ends: so preemption goes round in no circle.
    """

    preempts_for_arrivals = False

    def __init__(self, ageing_tokens: int) -> None:
        self._ageing_tokens = ageing_tokens

    def key(self, sequence: Sequence) -> OrderKey:
        num_to_sample = 1 if sequence.hold else sequence.length_limit - len(sequence.token_ids)
        remaining = sequence.num_pending + num_to_sample
        handicap = self._ageing_tokens * sequence.arrival_index
        return (remaining + handicap, sequence.arrival_index, sequence.index)

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        return False


POLICIES: Final[Mapping[str, Callable[[int], SchedulingPolicy]]] = MappingProxyType(
    {
        "fcfs": lambda ageing_tokens: FirstComeFirstServed(),
        "priority": lambda ageing_tokens: PriorityFirst(),
        "shortest_first": ShortestFirst,
    }
)
"""By name in the config; each is made from `ageing_tokens`."""


def choose_victim(
    policy: SchedulingPolicy, candidates: Iterable[Sequence], beneficiary: Sequence
) -> Sequence | None:
    """Return the last candidate behind `beneficiary`; None when there is none."""
    last = max(candidates, key=policy.key, default=None)
    if last is None or policy.key(last) <= policy.key(beneficiary):
        return None
    return last
