"""Messages of steps: what comes out is what went in; most steps take one broadcast."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rank_threads import run_ranks
from tiny_models import BLOCK_SIZE, BlockDealer, make_prompt

from engine import Slice, StepPlan
from engine.batch import Batch
from engine.parallel import Communicator
from engine.parallel.channel import MIN_CAPACITY, StepChannel
from engine.parallel.message import Kind, bare_message, kind_and_serial, read_step, step_message
from engine.sampling import MAX_ROWS
from protocol.errors import EngineFault
from protocol.ids import BlockId, HostBlockId


def make_plan(**more: Any) -> StepPlan:
    dealer = BlockDealer()
    decode, chunk, last = dealer.sequence(make_prompt(40), 3), dealer.sequence(make_prompt(50), 1), None
    decode.num_computed = 39
    last = dealer.sequence(make_prompt(33), 1, **more)
    last.num_computed = 16
    return StepPlan(
        [Slice(decode, 1), Slice(chunk, 20), Slice(last, 17)],
        38,
        num_decodes=1,
        copies=[(BlockId(3), BlockId(4))],
        swaps_out=[(BlockId(5), HostBlockId(0)), (BlockId(6), HostBlockId(1))],
        swaps_in=[(HostBlockId(2), BlockId(7))],
    )


def test_a_step_comes_out_as_it_went_in() -> None:
    plan = make_plan(prompt_logprobs=0)
    message = step_message(12, plan, BLOCK_SIZE)
    assert message.dtype == np.int32
    assert kind_and_serial(message) == (Kind.STEP, 12)
    step = read_step(message)
    assert step.moves == StepPlan(
        (), 0, copies=plan.copies, swaps_out=plan.swaps_out, swaps_in=plan.swaps_in
    )
    batch, expected = step.batch, Batch.of(plan.slices, BLOCK_SIZE)
    assert batch is not None
    for name in ("starts", "counts", "block_tables", "token_ids"):
        assert np.array_equal(getattr(batch, name), getattr(expected, name)), name
        assert getattr(batch, name).dtype == getattr(expected, name).dtype
    assert step.due_rows.tolist() == [0, 37]
    assert step.scored_rows.tolist() == list(range(21, 37))


def test_a_step_that_only_moves_has_no_batch() -> None:
    step = read_step(step_message(1, StepPlan((), 0, copies=[(BlockId(1), BlockId(2))]), BLOCK_SIZE))
    assert step.batch is None
    assert step.moves.copies == [(1, 2)]


def test_rows_to_score_come_in_the_leaders_portions() -> None:
    sequence = BlockDealer().sequence(make_prompt(300), 1, prompt_logprobs=0)
    step = read_step(step_message(1, StepPlan([Slice(sequence, 300)], 300), BLOCK_SIZE))
    assert [len(rows) for rows in step.logit_rows()] == [MAX_ROWS, MAX_ROWS, 299 - 2 * MAX_ROWS, 1]


@pytest.mark.parametrize("spoil", [lambda m: m[:-1], lambda m: np.append(m, m[:1])])
def test_a_step_of_the_wrong_length_is_a_fault(spoil: Any) -> None:
    with pytest.raises(EngineFault, match="should have"):
        read_step(spoil(step_message(1, make_plan(), BLOCK_SIZE)))


def test_what_is_no_message_is_a_fault() -> None:
    with pytest.raises(EngineFault, match="sent no message"):
        kind_and_serial(np.zeros(10, dtype=np.int32))


class Counting:
    """A communicator that counts its broadcasts."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def broadcast(self, x: torch.Tensor) -> None:
        self.sizes.append(len(x))
        self._inner.broadcast(x)


def test_messages_of_like_sizes_take_one_broadcast_each() -> None:
    lengths = (20, MIN_CAPACITY + 44, MIN_CAPACITY + 45, 255, 256, 10, 5000, 5001)

    def work(communicator: Communicator) -> tuple[list[int], list[int]]:
        counting = Counting(communicator)
        channel = StepChannel(counting)  # type: ignore[arg-type]
        received = []
        for length in lengths:
            if communicator.rank == 0:
                channel.send(np.arange(length, dtype=np.int32))
                received.append(length)
            else:
                message = channel.receive()
                assert message.tolist() == list(range(length))
                received.append(len(message))
        return received, counting.sizes

    leader, other = run_ranks(2, work)
    assert leader == other == (list(lengths), leader[1])
    # Two for each that is longer than the last one's power of two: the second, and the one of 5000.
    assert len(leader[1]) == len(lengths) + 2


def test_an_answer_to_another_message_is_a_fault() -> None:
    def work(communicator: Communicator) -> None:
        channel = StepChannel(communicator)
        if communicator.rank == 1:
            channel.answer(4)
            return
        with pytest.raises(EngineFault, match="rank 1 answered message 4 when 5 was due"):
            channel.hear(5)

    run_ranks(2, work)


def test_a_bare_message_has_a_kind_and_a_serial() -> None:
    assert kind_and_serial(bare_message(Kind.STOP, 9)) == (Kind.STOP, 9)
