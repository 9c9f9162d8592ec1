"""Who waits for a seat and blocks, in the policy's order?"""

from __future__ import annotations

from bisect import bisect_left, insort

from engine.policy import OrderKey, SchedulingPolicy
from engine.sequence import Sequence, SequenceState


class WaitingQueue:
    """WAITING, SWAPPED and RESERVING sequences, first one first. They do not change while they wait."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._entries: list[tuple[OrderKey, Sequence]] = []
        self.num_reserving = 0
        self.num_swapped = 0
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        """Tokens to be computed here: those of WAITING and SWAPPED sequences."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def first(self) -> Sequence | None:
        return self._entries[0][1] if self._entries else None

    @property
    def last_untouched(self) -> Sequence | None:
        """The last one that is to be computed here and has got nothing yet: no blocks, nor any token."""
        return next((sequence for _, sequence in reversed(self._entries) if _is_untouched(sequence)), None)

    def sequences(self) -> list[Sequence]:
        return [sequence for _, sequence in self._entries]

    def push(self, sequence: Sequence) -> None:
        insort(self._entries, (self._policy.key(sequence), sequence))
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._entries, (self._policy.key(sequence),))
        del self._entries[index]
        self._count(sequence, -1)

    def _count(self, sequence: Sequence, sign: int) -> None:
        if sequence.state is SequenceState.RESERVING:
            self.num_reserving += sign
            return
        if sequence.state is SequenceState.SWAPPED:
            self.num_swapped += sign
        else:
            self.num_waiting += sign
        self.num_waiting_tokens += sign * sequence.num_pending


def _is_untouched(sequence: Sequence) -> bool:
    is_new = sequence.state is SequenceState.WAITING and not sequence.was_admitted
    return is_new and not sequence.num_output_tokens
