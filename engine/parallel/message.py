"""What the leader tells the other ranks of a step: one flat array of int32, and back. Pure.

    kind | serial | sizes | moves | starts | counts | block tables | token ids | rows to score | rows due

It holds all that the step needs, so that the others keep nothing between steps and cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.batch import Batch
from engine.plan import StepPlan
from engine.sampling import MAX_ROWS, scored_rows
from protocol.errors import EngineFault
from protocol.ids import BlockId, HostBlockId

IntArray = npt.NDArray[np.int32]
_HEAD_SIZE = 10


class Kind(IntEnum):
    """What the others are to do."""

    STEP = 1
    PULSE = 2
    """Answer: the leader is there, and wants to know who else is."""
    STOP = 3


_KINDS = {int(kind): kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class RankStep:
    """One step as a rank sees it that does not sample."""

    moves: StepPlan
    """Without slices."""
    batch: Batch | None
    """None when the step only moves."""
    scored_rows: npt.NDArray[np.int64]
    due_rows: npt.NDArray[np.int64]

    def logit_rows(self) -> Iterator[npt.NDArray[np.int64]]:
        """The rows of each call for logits, in the order in which the leader makes them."""
        for start in range(0, len(self.scored_rows), MAX_ROWS):
            yield self.scored_rows[start : start + MAX_ROWS]
        yield self.due_rows


def step_message(serial: int, plan: StepPlan, block_size: int) -> IntArray:
    """The message of one plan, with what its sequences hold now."""
    moves = [_pairs(plan.copies), _pairs(plan.swaps_out), _pairs(plan.swaps_in)]
    sizes = [len(pairs) // 2 for pairs in moves]
    if not plan.slices:
        return _join([Kind.STEP, serial, *sizes, 0, 0, 0, 0, 0], moves)
    batch = Batch.of(plan.slices, block_size)
    query_starts = np.concatenate([[0], np.cumsum(batch.counts)]).astype(np.int32)
    scored = scored_rows(plan.slices, query_starts)
    due = query_starts[1:][[part.samples for part in plan.slices]] - 1
    sizes += [*batch.block_tables.shape, len(batch.token_ids), len(scored), len(due)]
    arrays: list[npt.NDArray[Any]] = [
        batch.starts,
        batch.counts,
        batch.block_tables.ravel(),
        batch.token_ids,
        scored,
        due,
    ]
    return _join([Kind.STEP, serial, *sizes], [*moves, *arrays])


def bare_message(kind: Kind, serial: int) -> IntArray:
    """A message that says its kind alone."""
    return _join([kind, serial, *[0] * (_HEAD_SIZE - 2)], [])


def kind_and_serial(message: IntArray) -> tuple[Kind, int]:
    """Raises `EngineFault` for what is no message."""
    head = message[:_HEAD_SIZE].tolist()
    if len(head) < _HEAD_SIZE or head[0] not in _KINDS:
        raise EngineFault(f"the leader sent no message: {head}")
    return _KINDS[head[0]], head[1]


def read_step(message: IntArray) -> RankStep:
    """Of a STEP. Raises `EngineFault` when its length is not what its sizes say."""
    copies, swaps_out, swaps_in, num_slices, num_columns, num_tokens, num_scored, num_due = message[
        2:_HEAD_SIZE
    ].tolist()
    sizes = [2 * copies, 2 * swaps_out, 2 * swaps_in, num_slices, num_slices]
    sizes += [num_slices * num_columns, num_tokens, num_scored, num_due]
    if len(message) != _HEAD_SIZE + sum(sizes):
        raise EngineFault(f"a step of {len(message)} numbers should have {_HEAD_SIZE + sum(sizes)}")
    cut = np.split(message[_HEAD_SIZE:], np.cumsum(sizes)[:-1])
    batch = Batch(_wide(cut[3]), _wide(cut[4]), cut[5].reshape(num_slices, num_columns), _wide(cut[6]))
    return RankStep(
        StepPlan(
            (),
            0,
            copies=[(BlockId(a), BlockId(b)) for a, b in _unpair(cut[0])],
            swaps_out=[(BlockId(a), HostBlockId(b)) for a, b in _unpair(cut[1])],
            swaps_in=[(HostBlockId(a), BlockId(b)) for a, b in _unpair(cut[2])],
        ),
        batch if num_slices else None,
        _wide(cut[7]),
        _wide(cut[8]),
    )


def _join(head: list[int], arrays: Items[npt.NDArray[Any]]) -> IntArray:
    return np.concatenate([np.array(head, dtype=np.int32), *arrays]).astype(np.int32)


def _pairs(pairs: Items[tuple[int, int]]) -> IntArray:
    return np.array(pairs, dtype=np.int32).ravel()


def _unpair(flat: IntArray) -> list[list[int]]:
    pairs: list[list[int]] = flat.reshape(-1, 2).tolist()
    return pairs


def _wide(array: IntArray) -> npt.NDArray[np.int64]:
    return array.astype(np.int64)
