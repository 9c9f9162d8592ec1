"""A rank that is not the leader: does its part of each step that it is told of, until it is told to stop.

receive --STEP--> move, compute one's part --> answer --> receive ...
        --PULSE-> answer
        --STOP--> answer, and the end
any failure, here or at another rank: leave the group, so that all end; EngineFault
"""

from __future__ import annotations

import torch

from engine.device import wait_for
from engine.forward import ForwardPass
from engine.parallel.channel import StepChannel
from engine.parallel.message import Kind, RankStep, kind_and_serial, read_step


class Follower:
    """One rank's work. Used by one thread."""

    def __init__(self, forward: ForwardPass, channel: StepChannel) -> None:
        """`forward` has this rank's part of the model. The channel is owned."""
        self._forward = forward
        self._channel = channel

    def run(self) -> None:
        """Until the leader says stop. Raises `EngineFault` when it is gone, and whatever fails here."""
        try:
            while self._do_next():
                pass
        finally:
            self._channel.close()

    def _do_next(self) -> bool:
        message = self._channel.receive()
        kind, serial = kind_and_serial(message)
        if kind is Kind.STEP:
            self._execute(read_step(message))
        self._channel.answer(serial)
        return kind is not Kind.STOP

    def _execute(self, step: RankStep) -> None:
        """What the leader's runner does, but for sampling."""
        with torch.inference_mode():
            self._forward.move(step.moves)
            if step.batch is not None:
                hidden = self._forward.run(step.batch, self._forward.layout(step.batch))
                for rows in step.logit_rows():
                    self._forward.logits(hidden, rows)
            wait_for(self._forward.model.device)
