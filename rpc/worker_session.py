"""How does a router keep one stream to a worker alive, and learn at once when it is not?

    start ──> CONNECTED ──(stream ends | no frame for `frame_timeout_s`)──> BROKEN ──backoff──> CONNECTED
                       | a frame that is refused                               │ on_broken, once
A worker sends a frame at least every second, so silence means trouble. So does a frame that cannot be
handled: the stream is given up, lest the worker compute for requests that nobody waits for any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc

from protocol.errors import EngineFault, SplitserveError, WorkerUnavailable
from protocol.ports import Clock
from rpc.failures import error_from_rpc
from rpc.watchdog import Watchdog

CommandT = TypeVar("CommandT")
FrameT = TypeVar("FrameT")

logger = logging.getLogger(__name__)

MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
SEND_LIMITS = 3
"""Time limits of a frame that a command may take to leave: a peer that is heard may be slow to listen."""


class WorkerSession(Generic[CommandT, FrameT]):
    """One multiplexed stream to one worker. Used on one event loop.

    `on_frame` gets every frame. What it raises breaks the stream: a `SplitserveError` is the reason as
    it stands, anything else is a bug, which is logged. `on_broken` gets the reason whenever an
    established stream ends for any cause but `close`; whatever was submitted on it is lost by then.
    """

    def __init__(
        self,
        open_stream: Callable[[], grpc.aio.StreamStreamCall[CommandT, FrameT]],
        on_frame: Callable[[FrameT], None],
        on_broken: Callable[[SplitserveError], None],
        clock: Clock,
        frame_timeout_s: float = 5.0,
        *,
        peer: str = "worker",
    ) -> None:
        self._open_stream = open_stream
        self._on_frame = on_frame
        self._on_broken = on_broken
        self._clock = clock
        self._frame_timeout_s = frame_timeout_s
        self._peer = peer
        self._call: grpc.aio.StreamStreamCall[CommandT, FrameT] | None = None
        self._sending = asyncio.Lock()
        """gRPC takes one write at a time."""
        self._task: asyncio.Task[None] | None = None
        self._watchdog: Watchdog
        """Of the stream that was opened last."""
        self._connected_at_s = 0.0
        self._backoff_s = MIN_BACKOFF_S

    @property
    def connected(self) -> bool:
        """Whether a stream is up: it had a first frame and has not ended."""
        return self._call is not None

    async def start(self) -> None:
        """Connect, and stay connected until `close`.

        Returns when the first frame is there. Raises the reason when it does not come within
        `frame_timeout_s`, or is refused; the session then does not go on trying.
        """
        await self._connect()
        self._task = asyncio.create_task(self._run())

    async def send(self, command: CommandT) -> None:
        """Write one command. Raises `WorkerUnavailable` when no stream is up, or it breaks over this."""
        call = self._call
        if call is None:
            raise WorkerUnavailable(f"{self._peer}: not connected")
        try:
            async with asyncio.timeout(SEND_LIMITS * self._frame_timeout_s), self._sending:
                await call.write(command)
        except asyncio.CancelledError as error:
            if _is_being_cancelled() or not call.cancelled():
                raise
            raise self._broke_while_sending(error) from error
        except Exception as error:  # whatever it was, whoever waits for an answer must hear of it
            call.cancel()
            raise self._broke_while_sending(error) from error

    def _broke_while_sending(self, error: BaseException) -> WorkerUnavailable:
        return WorkerUnavailable(f"{self._peer}: the stream broke while sending ({type(error).__name__})")

    async def close(self) -> None:
        """End the stream; `on_broken` is not called. Idempotent, bounded."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            self._drop_call()  # a task that was cancelled before it ever ran did not
            if not task.cancelled():
                task.result()

    async def _connect(self) -> None:
        call = self._open_stream()
        self._watchdog = Watchdog(self._frame_timeout_s, call.cancel, self._clock)
        try:
            first = await self._read(call)
        except BaseException:
            self._watchdog.stop()
            call.cancel()
            raise
        self._call = call
        self._connected_at_s = self._clock()
        try:
            self._deliver(first)
        except SplitserveError as error:
            self._drop_call()
            self._tell_broken(error)
            raise

    def _deliver(self, frame: FrameT) -> None:
        """Raises `SplitserveError`, whatever `on_frame` raises."""
        try:
            self._on_frame(frame)
        except SplitserveError:
            raise
        except Exception as error:
            logger.exception("a frame of %s could not be handled", self._peer)
            raise EngineFault(
                f"{self._peer}: a frame could not be handled: {type(error).__name__}: {error}"
            ) from error

    def _tell_broken(self, error: SplitserveError) -> None:
        try:
            self._on_broken(error)
        except Exception:  # a bug there must not end the session: nobody would reconnect
            logger.exception("the end of the stream to %s could not be told", self._peer)

    async def _read(self, call: grpc.aio.StreamStreamCall[CommandT, FrameT]) -> FrameT:
        """The next frame. Raises the reason when there is none in time."""
        try:
            frame: Any = await call.read()
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self._peer) from error
        except asyncio.CancelledError:
            # gRPC reports a call that was cancelled (by `send`, say) with the same exception as ours.
            if call.cancelled() and not _is_being_cancelled():
                raise WorkerUnavailable(f"{self._peer}: {self._why_cancelled()}") from None
            raise
        self._watchdog.feed()
        if frame is grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
            raise WorkerUnavailable(f"{self._peer}: ended the stream")
        received: FrameT = frame
        return received

    def _why_cancelled(self) -> str:
        is_silent = self._watchdog.has_barked
        return f"silent for {self._frame_timeout_s:g} s" if is_silent else "the stream broke"

    async def _run(self) -> None:
        while True:
            self._tell_broken(await self._read_until_broken())
            await self._reconnect()

    async def _read_until_broken(self) -> SplitserveError:
        assert self._call is not None, "a session reads only while connected"  # noqa: S101
        try:
            while True:
                self._deliver(await self._read(self._call))
        except SplitserveError as error:
            return error
        finally:
            self._drop_call()

    def _drop_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            self._watchdog.stop()
            call.cancel()

    async def _reconnect(self) -> None:
        """Try until it works. A stream that lived for a while resets the backoff."""
        if self._clock() - self._connected_at_s > MAX_BACKOFF_S:
            self._backoff_s = MIN_BACKOFF_S
        while True:
            await asyncio.sleep(self._backoff_s)
            self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
            try:
                return await self._connect()
            except SplitserveError:
                continue  # on_broken has said it; the next try comes after the backoff


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
