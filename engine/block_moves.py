"""Which blocks must the device move before it computes the next step?

The scheduler collects moves while it plans; the step carries out those to the host, those from the
host, then the copies. The order is safe because a plan preempts before it admits (so nothing is read
from the host that is overwritten in the same step), and because the source of a copy keeps its
reference until the plan is complete (so nobody gets it as the destination of something else).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from engine.sequence import Sequence
from protocol.ids import BlockId, HostBlockId


@dataclass(slots=True)
class BlockMoves:
    """What was decided since the last plan; empty between steps."""

    swaps_out: list[tuple[BlockId, HostBlockId]] = field(default_factory=list)
    swaps_in: list[tuple[HostBlockId, BlockId]] = field(default_factory=list)
    copies: dict[Sequence, tuple[BlockId, BlockId]] = field(default_factory=dict)
    """(source, destination) of a sequence's last written block: no sequence has two in one step."""
    leaving: Counter[BlockId] = field(default_factory=Counter)
    """References to the sources that are given up when the plan is complete."""

    def copy(self, sequence: Sequence, source: BlockId, destination: BlockId) -> None:
        self.copies[sequence] = source, destination
        self.leaving[source] += 1

    def clear(self) -> None:
        for pending in (self.swaps_out, self.swaps_in, self.copies, self.leaving):
            pending.clear()

    def take_back(self, sequence: Sequence) -> tuple[BlockId, BlockId]:
        """Forget the copy of a sequence."""
        source, destination = self.copies.pop(sequence)
        self.leaving[source] -= 1
        return source, destination
