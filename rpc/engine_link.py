"""How do asyncio code and an engine thread talk?

Commands go straight to the engine's queue. Events come back on the engine's thread, one batch per
step; the whole batch hops to the event loop at once and is dealt out to the sequences' listeners in
one callback, so that a step makes one frame per session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from protocol.errors import EngineFault, SplitserveError
from protocol.histogram import StepsSnapshot
from protocol.ids import SequenceId
from protocol.membership import Load
from rpc.health import Health

WATCH_PERIOD_S = 0.25


class HasSequence(Protocol):
    """An event of one sequence."""

    @property
    def seq_id(self) -> SequenceId: ...


class EngineStats(Protocol):
    """What an engine says about itself; a snapshot between two steps."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_reserving(self) -> int: ...
    @property
    def num_held(self) -> int: ...
    @property
    def num_fetching(self) -> int: ...
    @property
    def blocks_total(self) -> int: ...
    @property
    def blocks_free(self) -> int: ...
    @property
    def num_swapped(self) -> int: ...
    @property
    def num_preemptions_recompute(self) -> int: ...
    @property
    def num_preemptions_swap(self) -> int: ...
    @property
    def swapped_in_blocks(self) -> int: ...
    @property
    def swapped_out_blocks(self) -> int: ...
    @property
    def prefix_queries_tokens(self) -> int: ...
    @property
    def prefix_hits_tokens(self) -> int: ...
    @property
    def prompt_tokens_computed(self) -> int: ...
    @property
    def prompt_tokens_cached(self) -> int: ...
    @property
    def prompt_tokens_transferred(self) -> int: ...
    @property
    def generated_tokens(self) -> int: ...
    @property
    def steps(self) -> StepsSnapshot:
        """All steps so far, so that nobody has to look at every one of them."""

    @property
    def load(self) -> Load:
        """The same in the cluster's words."""


CommandT_contra = TypeVar("CommandT_contra", contravariant=True)
EventT = TypeVar("EventT", bound=HasSequence)
CommandT = TypeVar("CommandT")


class Engine(Protocol[CommandT_contra]):
    """The engine's outside, as its thread offers it."""

    @property
    def alive(self) -> bool: ...
    @property
    def fault(self) -> SplitserveError | None: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def progress(self) -> int:
        """Grows while a step computes, when `stats` stand still. Thread-safe."""

    def start(self) -> None: ...

    def post(self, command: CommandT_contra) -> None:
        """Queue a command. Thread-safe, never blocks.

        Raises what ended the engine when a new sequence comes too late to be answered.
        """

    def stop(self, timeout_s: float) -> None:
        """End the thread. Blocks up to `timeout_s`, then raises `EngineFault`."""


class EngineLink(Generic[CommandT, EventT]):
    """One worker's connection to its engine. Used on one event loop, but for `_on_events`."""

    def __init__(
        self,
        make_engine: Callable[[Callable[[Sequence[EventT]], None]], Engine[CommandT]],
        health: Health,
    ) -> None:
        """`make_engine` gets the callback for the batches of events, called on the engine's thread."""
        self._engine = make_engine(self._on_events)
        self._health = health
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listeners: dict[SequenceId, Callable[[EventT], None]] = {}
        self._num_named = 0

    def start(self) -> None:
        """Start the engine; events arrive on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._engine.start()

    async def stop(self, timeout_s: float) -> None:
        await asyncio.to_thread(self._engine.stop, timeout_s)

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def load(self) -> Load:
        """As of the last step, with the progress of the one that runs."""
        return replace(self._engine.stats.load, progress=self._engine.progress)

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    def new_sequence_id(self, name: str) -> SequenceId:
        """An id that this engine never saw, though `name` may be sent again (retry, resume)."""
        self._num_named += 1
        return SequenceId(f"{name}#{self._num_named}")

    def post(self, command: CommandT) -> None:
        self._engine.post(command)

    def listen(self, seq_id: SequenceId, listener: Callable[[EventT], None]) -> None:
        """Call `listener` with every event of `seq_id` until `forget`."""
        self._listeners[seq_id] = listener

    def forget(self, seq_id: SequenceId) -> None:
        self._listeners.pop(seq_id, None)

    def _on_events(self, events: Sequence[EventT]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deal, events)

    def _deal(self, events: Sequence[EventT]) -> None:
        try:
            for event in events:
                listener = self._listeners.get(event.seq_id)
                if listener is not None:
                    listener(event)
        except Exception as error:  # the rest of the batch is lost: those who wait for it must hear of it
            fault = EngineFault(f"an event was not understood: {type(error).__name__}: {error}")
            fault.__cause__ = error
            self._health.report(fault)
        if self._engine.fault is not None:  # at once: what is submitted from here on is lost
            self._health.report(self._engine.fault)

    async def watch(self) -> None:
        """Report the engine's fault or death. Runs until then or until cancelled."""
        while True:
            self.check()
            if self._health.fault is not None:
                return
            await asyncio.sleep(WATCH_PERIOD_S)

    def check(self) -> None:
        """Report the engine's fault or death now, if there is one."""
        if self._engine.fault is not None:
            self._health.report(self._engine.fault)
        elif not self._engine.alive:
            self._health.report(EngineFault("the engine thread has ended"))
