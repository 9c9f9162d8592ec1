"""A fake device that also knows since when, and for whom, the KV in a slot counts."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

from engine.fake_executor import FakeExecutor
from engine.plan import Slice, StepPlan, StepResult
from protocol.errors import EngineFault
from protocol.ids import BlockId, SequenceId


class Stamp(NamedTuple):
    """What the KV of a token stems from: that of all before it, too."""

    since: int
    """The earliest time at which any of it was computed."""
    salt: str


class StampedExecutor(FakeExecutor):
    """Refuses to read KV from before an invalidation, or of another salt."""

    def __init__(self, block_size: int, vocab_size: int) -> None:
        super().__init__(block_size, vocab_size)
        self._size = block_size
        self._stamps: dict[tuple[BlockId, int], Stamp] = {}
        self._host_stamps: dict[tuple[int, int], Stamp] = {}
        self.now = 0
        self.not_before: dict[SequenceId, int] = {}
        """Sequences that came after an invalidation that concerns them, and when that was."""
        self.computed: dict[tuple[SequenceId, int], set[int]] = {}
        """(sequence id, choice) -> positions that were ever computed here."""
        self.on_plan: Callable[[StepPlan], None] = lambda plan: None

    def execute(self, plan: StepPlan) -> StepResult:
        self.on_plan(plan)
        self._move_stamps(plan)
        stamps = [self._read(piece) for piece in plan.slices]
        result = super().execute(plan)
        for piece, stamp in zip(plan.slices, stamps, strict=True):
            sequence, start = piece.sequence, piece.sequence.num_computed
            self.stamp(sequence.block_table, start, start + piece.num_tokens, stamp)
            computed = self.computed.setdefault((sequence.seq_id, sequence.index), set())
            computed.update(range(start, start + piece.num_tokens))
        return result

    def stamp(self, block_table: Items[BlockId], start: int, stop: int, stamp: Stamp) -> None:
        for position in range(start, stop):
            self._stamps[block_table[position // self._size], position % self._size] = stamp

    def _read(self, piece: Slice) -> Stamp:
        sequence = piece.sequence
        stamps = []
        for position in range(sequence.num_computed):
            slot = sequence.block_table[position // self._size], position % self._size
            if slot not in self._stamps:
                raise EngineFault(f"{sequence.seq_id} reads slot {slot}, which holds nothing")
            stamps.append(self._stamps[slot])
        since = min((stamp.since for stamp in stamps), default=self.now)
        if since < self.not_before.get(sequence.seq_id, 0):
            raise EngineFault(f"{sequence.seq_id} reads KV from before an invalidation")
        if any(stamp.salt != sequence.cache_salt for stamp in stamps):
            raise EngineFault(f"{sequence.seq_id} reads KV of another salt")
        return Stamp(since, sequence.cache_salt)

    def _move_stamps(self, plan: StepPlan) -> None:
        for offset in range(self._size):
            for source, host in plan.swaps_out:
                _move(self._stamps, (source, offset), self._host_stamps, (host, offset))
        for offset in range(self._size):
            for host, target in plan.swaps_in:
                _move(self._host_stamps, (host, offset), self._stamps, (target, offset))
        for offset in range(self._size):
            for source, target in plan.copies:
                _move(self._stamps, (source, offset), self._stamps, (target, offset))


def _move(source: dict, key: tuple[int, int], target: dict, target_key: tuple[int, int]) -> None:  # type: ignore[type-arg]
    if key in source:
        target[target_key] = source[key]
    else:
        target.pop(target_key, None)
