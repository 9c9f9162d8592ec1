"""How do the events of many requests leave a worker as one frame per engine step?

Events of one step are put into the frame under construction while the event loop runs one callback;
the writer wakes up afterwards and takes the frame as a whole. While the writer waits for a slow
reader, the next frame keeps growing, up to a bound.

    commands ──> on_command ──> (worker) ──> outbox.pending() ──> write(frame)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Generic, TypeVar

import grpc

from protocol.errors import Overloaded, SplitserveError, WorkerUnavailable

CommandT = TypeVar("CommandT")
FrameT = TypeVar("FrameT")

HEARTBEAT_S = 1.0
MAX_PENDING_EVENTS = 50_000
"""Some 10 MB of tokens: no healthy router is this far behind."""
WRITE_TIMEOUT_S = 10.0
"""A write waits for the peer to read. One that takes no frame for so long holds back what grows here."""


class FrameOutbox(Generic[FrameT]):
    """The frames of one session. Used on one event loop."""

    def __init__(
        self,
        new_frame: Callable[[], FrameT],
        stamp: Callable[[FrameT], None],
        *,
        heartbeat_s: float = HEARTBEAT_S,
        max_pending: int = MAX_PENDING_EVENTS,
    ) -> None:
        """`stamp` writes the load into a frame just before it leaves."""
        self._new_frame = new_frame
        self._stamp = stamp
        self._heartbeat_s = heartbeat_s
        self._max_pending = max_pending
        self._frame = new_frame()
        self._num_pending = 0
        self._in_flight: FrameT | None = None
        self._is_due = asyncio.Event()
        self._is_due.set()  # the first frame leaves at once: it tells the peer that all is well
        self._is_closed = False
        self._is_finishing = False
        self._error: SplitserveError | None = None

    def pending(self) -> FrameT:
        """The frame to put one event into. It leaves when this callback has returned."""
        self._num_pending += 1
        if self._num_pending > self._max_pending and not self._is_closed:
            self.close(Overloaded(f"{self._max_pending} events wait for a peer that reads too slowly"))
        self._is_due.set()
        return self._frame

    def close(self, error: SplitserveError | None = None) -> None:
        """End the stream of frames, with an error or in peace. The first call decides."""
        if not self._is_closed:
            self._is_closed = True
            self._error = error
            self._is_due.set()

    def finish(self, error: SplitserveError) -> None:
        """End the stream with an error, behind the frame that is pending now."""
        if not self._is_closed:
            self._is_finishing = self._num_pending > 0
            self.close(error)

    async def next_frame(self) -> FrameT | None:
        """Wait for the next frame, a heartbeat at the latest; None after a close in peace.

        Asking for the next frame says that the one before has been written.
        """
        self._in_flight = None
        with suppress(TimeoutError):
            async with asyncio.timeout(self._heartbeat_s):
                await self._is_due.wait()
        if self._is_closed and not self._is_finishing:
            if self._error is not None:
                raise self._error
            return None
        self._in_flight = self.take()
        if self._is_finishing:
            self._is_finishing = False
            self._is_due.set()  # the end follows at once
        return self._in_flight

    def take(self) -> FrameT:
        """The frame as it is now, whether or not anything is in it; the next one starts empty."""
        self._is_due.clear()
        frame, self._frame = self._frame, self._new_frame()
        self._num_pending = 0
        self._stamp(frame)
        return frame

    def unsent(self) -> list[FrameT]:
        """What was promised but not written; to be asked once the session has ended."""
        return [frame for frame in (self._in_flight, self._frame) if frame is not None]


async def run_session(
    commands: AsyncIterator[CommandT],
    on_command: Callable[[CommandT], None],
    outbox: FrameOutbox[FrameT],
    write: Callable[[FrameT], Awaitable[None]],
) -> None:
    """Serve one stream until the peer ends it or the outbox is closed. Cancellation is an end, too.

    Raises the error that the outbox was closed with, or `WorkerUnavailable` when the peer does not read.
    """
    reader = asyncio.create_task(_read(commands, on_command, outbox))
    try:
        while (frame := await outbox.next_frame()) is not None:
            await _write(frame, write)
    finally:
        reader.cancel()
        await asyncio.wait([reader])
    if not reader.cancelled():
        reader.result()


async def _write(frame: FrameT, write: Callable[[FrameT], Awaitable[None]]) -> None:
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await write(frame)
    except TimeoutError as error:
        raise WorkerUnavailable(f"the peer took no frame for {WRITE_TIMEOUT_S:g} s") from error


async def _read(
    commands: AsyncIterator[CommandT],
    on_command: Callable[[CommandT], None],
    outbox: FrameOutbox[FrameT],
) -> None:
    try:
        async for command in commands:
            on_command(command)
    except grpc.aio.BaseError as error:
        outbox.close(WorkerUnavailable(f"the peer's stream broke: {error}"))
    finally:
        outbox.close()
