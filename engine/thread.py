"""On which thread does the engine run, and how do commands and events cross over?

    start --> handle commands, step, publish stats --stop--> live sequences fail with WorkerUnavailable
                        \\--any exception--> live sequences fail with EngineFault, `fault` is set
The core belongs to this thread alone. Commands come in through a queue; events go out by a callback.
There are no locks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

from engine.core import EngineCore
from engine.messages import AddSequence, Command, Event, ReserveSequence, SequenceFailed
from engine.stats import EngineStats
from protocol.errors import EngineFault, SplitserveError, WorkerUnavailable

logger = logging.getLogger(__name__)

OnEvents = Callable[[list[Event]], None]
"""Called on the engine thread with events in order, never an empty list. Must not block or raise."""


class EngineThread:
    """Runs one core until it is stopped or breaks. Everything public may be used from any thread."""

    def __init__(
        self,
        core: EngineCore,
        on_events: OnEvents,
        name: str,
        idle_wait_s: float = 1.0,
        *,
        progress: Callable[[], int] | None = None,
        keep_alive: Callable[[], None] | None = None,
    ) -> None:
        """`progress` grows while the core's executor computes; None: with its steps. Thread-safe.

        `keep_alive` is called on the engine thread, at least every `idle_wait_s`, while there is nothing to
        compute. What it raises ends the engine.
        """
        self._core = core
        self._on_events = on_events
        self._idle_wait_s = idle_wait_s
        self._inbox: SimpleQueue[Command | None] = SimpleQueue()  # None only wakes the thread
        self._in_hand: Command | None = None
        self._is_stopping = False
        self._end: SplitserveError | None = None
        self._fault: EngineFault | None = None
        self._stats = core.stats()
        self._keep_alive = keep_alive or (lambda: None)
        self._progress = progress or (lambda: self._stats.num_steps)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread runs, and so commands are answered."""
        return self._thread.is_alive() and self._end is None

    @property
    def fault(self) -> EngineFault | None:
        """Why the engine broke; None while it has not."""
        return self._fault

    @property
    def stats(self) -> EngineStats:
        """The snapshot after the last step or command."""
        return self._stats

    @property
    def progress(self) -> int:
        """Grows while the engine computes, within its steps, too."""
        return self._progress()

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Command) -> None:
        """Hand a command over, at any time, without waiting.

        Raises what ended the engine (`EngineFault` or `WorkerUnavailable`) when a new sequence comes
        too late to be answered; other commands are moot then and ignored.
        """
        self._inbox.put(command)
        # Read after the put: the thread sets `_end` before it empties the inbox for the last time, so a
        # command is answered there or refused here. It may be both; a second failure is harmless.
        end = self._end
        if end is not None and isinstance(command, AddSequence | ReserveSequence):
            raise end

    def stop(self, timeout_s: float) -> None:
        """End after the step in progress. Idempotent. Raises `EngineFault` if that takes too long."""
        self._is_stopping = True
        self._inbox.put(None)
        if self._thread.ident is None:
            return  # never started
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise EngineFault(f"{self._thread.name} did not stop within {timeout_s} s: its step hangs")

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._handle_commands()
                if self._core.has_work:
                    self._tell(self._core.step(announce=self._tell))
                else:
                    self._keep_alive()
                self._stats = self._core.stats()
        except BaseException as error:  # nothing is above a thread: whatever it was, it is told
            self._end_broken(error)
        else:
            self._end_stopped()

    def _handle_commands(self) -> None:
        for command in self._arrived():
            if command is not None:
                self._in_hand = command
                self._tell(self._core.handle(command))
                self._in_hand = None

    def _arrived(self) -> Iterator[Command | None]:
        """Yield what is in the inbox now; with nothing to compute, wait a while for something."""
        num_arrived = self._inbox.qsize()  # a bound, so that a flood of commands cannot hold up the steps
        if num_arrived == 0 and not self._core.has_work:
            try:
                yield self._inbox.get(timeout=self._idle_wait_s)
            except Empty:
                return
            num_arrived = self._inbox.qsize()
        for _ in range(num_arrived):
            yield self._inbox.get_nowait()

    def _tell(self, events: list[Event]) -> None:
        if events:
            self._stats = self._core.stats()  # whoever hears of blocks finds them counted
            self._on_events(events)

    def _end_stopped(self) -> None:
        self._end = WorkerUnavailable("the engine has stopped")
        self._tell(self._core.abort_all(self._end) + self._refuse_rest(self._end))
        self._stats = self._core.stats()

    def _end_broken(self, error: BaseException) -> None:
        """Tell everyone. The core's state is not trusted any more: it is read for ids and events only."""
        fault = EngineFault(f"the engine broke: {type(error).__name__}: {error}")
        fault.__cause__ = error
        self._fault = self._end = fault
        logger.error("%s ends with a fault", self._thread.name, exc_info=error)
        failures: list[Event] = [SequenceFailed(seq_id, fault) for seq_id in self._core.live_sequence_ids]
        if events := self._core.untold_events + failures + self._refuse_rest(fault):
            self._on_events(events)

    def _refuse_rest(self, error: SplitserveError) -> list[Event]:
        """Answer the new sequences that nobody will look at any more."""
        rest = [self._in_hand]
        while not self._inbox.empty():
            rest.append(self._inbox.get_nowait())
        return [
            SequenceFailed(command.seq_id, error)
            for command in rest
            if isinstance(command, AddSequence | ReserveSequence)
            and command.seq_id not in self._core.live_sequence_ids
        ]
