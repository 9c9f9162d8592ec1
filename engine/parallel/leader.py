"""The first rank of a worker: plans, samples, and takes the other ranks along.

    execute(plan):  send the step --> compute one's part, sample --> hear that all are done
    keep_alive():   a pulse       -->                                hear that all are there
    any failure:    leave the group, so that the others end too; EngineFault
The engine's core sees an executor and knows of no ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from engine.parallel.channel import StepChannel
from engine.parallel.message import Kind, bare_message, step_message
from engine.plan import StepPlan, StepResult
from engine.runner import ModelRunner
from protocol.ports import Clock

PULSE_S = 1.0
"""A rank that died is noticed within it while nothing is computed."""


class LeaderRunner:
    """Implements `engine.plan.Executor` over a group of ranks. Used by the engine thread."""

    def __init__(
        self,
        runner: ModelRunner,
        channel: StepChannel,
        block_size: int,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        """`runner` has this rank's part of the model. The channel is owned."""
        self._runner = runner
        self._channel = channel
        self._block_size = block_size
        self._clock = clock
        self._serial = 0
        self._heard_s = clock()
        self._has_left = False

    @property
    def ops_name(self) -> str:
        """What computes, for people."""
        return self._runner.ops_name

    @property
    def progress(self) -> int:
        """Grows with every layer of every step. May be read from any thread."""
        return self._runner.progress

    def execute(self, plan: StepPlan) -> StepResult:
        """As the runner's, on all ranks; all of them are done when it returns. Raises `EngineFault`."""
        with self._in_step():
            self._serial += 1
            self._channel.send(step_message(self._serial, plan, self._block_size))
            result = self._runner.execute(plan)
            self._channel.hear(self._serial)
            return result

    def warm_up(self) -> None:
        """As the runner's, on all ranks."""
        for plan in self._runner.warm_up_plans():
            self.execute(plan)

    def keep_alive(self) -> None:
        """Tell the others of the leader, and find out whether all are there, unless that was just done.

        To be called all the time while there is nothing to execute: the others take a leader from which
        they hear nothing within the group's limit for lost. Raises `EngineFault`.
        """
        if self._clock() - self._heard_s >= PULSE_S:
            self._tell(Kind.PULSE)

    def stop(self) -> None:
        """Let the others end in peace. Idempotent; nothing can be executed any more."""
        if self._has_left:
            return
        try:
            self._tell(Kind.STOP)
        finally:
            self._leave()

    def abort(self) -> None:
        """From any thread: the step in progress, if any, fails soon."""
        self._channel.abort()

    def _tell(self, kind: Kind) -> None:
        with self._in_step():
            self._serial += 1
            self._channel.send(bare_message(kind, self._serial))
            self._channel.hear(self._serial)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        try:
            yield
            self._heard_s = self._clock()
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        self._has_left = True
        self._channel.close()
