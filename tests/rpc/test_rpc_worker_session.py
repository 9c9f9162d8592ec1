"""The router's end of a stream: first frame, silence, breaks, reconnects. Virtual time, fake streams."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from virtual_time import settle, virtual_time

from protocol.errors import EngineFault, SplitserveError, Unauthorized, WorkerUnavailable
from rpc import WorkerSession


def rpc_error(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "details", None)


class FakeStream:
    """A stream-stream call whose worker is the test."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[object] = asyncio.Queue()
        self.written: list[str] = []
        self.is_cancelled = False
        self.write_error: BaseException | None = None

    async def read(self) -> object:
        item = await self.incoming.get()
        if isinstance(item, BaseException):
            raise item
        return item

    async def write(self, command: str) -> None:
        if self.write_error is not None:
            raise self.write_error
        if self.is_cancelled:
            raise asyncio.InvalidStateError("RPC already finished.")
        self.written.append(command)

    def cancel(self) -> bool:
        if not self.is_cancelled:
            self.is_cancelled = True
            self.incoming.put_nowait(asyncio.CancelledError())
        return True

    def cancelled(self) -> bool:
        return self.is_cancelled


class Router:
    """Records what a session reports; hands out one fake stream per connection."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.opened_at_s: list[float] = []
        self._attempts: asyncio.Queue[None] = asyncio.Queue()
        self.greet = True
        self.frames: list[str] = []
        self.broken: list[SplitserveError] = []
        self.frame_error: Exception | None = None
        """Raised at every frame."""
        self.broken_error: Exception | None = None
        loop = asyncio.get_running_loop()
        self._now = loop.time
        self.session: WorkerSession[str, str] = WorkerSession(
            self.open,  # type: ignore[arg-type]
            self._on_frame,
            self._on_broken,
            loop.time,
            frame_timeout_s=5.0,
            peer="w",
        )

    def _on_frame(self, frame: str) -> None:
        self.frames.append(frame)
        if self.frame_error is not None:
            raise self.frame_error

    def _on_broken(self, error: SplitserveError) -> None:
        self.broken.append(error)
        if self.broken_error is not None:
            raise self.broken_error

    async def next_attempt(self) -> None:
        await self._attempts.get()

    def open(self) -> FakeStream:
        stream = FakeStream()
        self.streams.append(stream)
        self.opened_at_s.append(self._now())
        self._attempts.put_nowait(None)
        if self.greet:
            stream.incoming.put_nowait("hello")
        return stream


@virtual_time
async def test_start_returns_with_the_first_frame() -> None:
    router = Router()
    await router.session.start()
    assert router.frames == ["hello"]
    assert router.session.connected
    await router.session.send("do it")
    assert router.streams[0].written == ["do it"]
    await router.session.close()
    await router.session.close()
    assert router.broken == []
    assert router.streams[0].is_cancelled


@virtual_time
async def test_start_raises_when_the_worker_stays_silent() -> None:
    router = Router()
    router.greet = False
    with pytest.raises(WorkerUnavailable, match="silent for 5 s"):
        await router.session.start()
    assert router.streams[0].is_cancelled
    await asyncio.sleep(60)
    assert len(router.streams) == 1


@virtual_time
async def test_start_raises_the_refusal() -> None:
    router = Router()
    router.greet = False
    starting = asyncio.create_task(router.session.start())
    await settle()
    router.streams[0].incoming.put_nowait(rpc_error(grpc.StatusCode.UNAUTHENTICATED))
    with pytest.raises(Unauthorized):
        await starting


@virtual_time
async def test_silence_breaks_the_session_and_it_reconnects() -> None:
    router = Router()
    await router.session.start()
    await asyncio.sleep(5.05)
    assert [type(e) for e in router.broken] == [WorkerUnavailable]
    assert not router.session.connected
    with pytest.raises(WorkerUnavailable, match="not connected"):
        await router.session.send("x")
    await asyncio.sleep(0.1)
    assert router.session.connected
    await router.session.close()


@pytest.mark.parametrize("end", [rpc_error(grpc.StatusCode.UNAVAILABLE), grpc.aio.EOF])
def test_end_of_the_stream_is_reported_once(end: object) -> None:
    @virtual_time
    async def run() -> None:
        router = Router()
        await router.session.start()
        router.streams[0].incoming.put_nowait(end)
        await settle()
        assert [type(e) for e in router.broken] == [WorkerUnavailable]
        await router.session.close()

    run()


@virtual_time
async def test_reconnects_with_bounded_backoff_and_reports_the_break_once() -> None:
    router = Router()
    await router.session.start()
    await router.next_attempt()
    router.greet = False
    router.streams[0].incoming.put_nowait(grpc.aio.EOF)
    for _ in range(8):
        await router.next_attempt()
        router.streams[-1].incoming.put_nowait(rpc_error(grpc.StatusCode.UNAVAILABLE))
        await settle()
    gaps = [b - a for a, b in zip(router.opened_at_s, router.opened_at_s[1:], strict=False)]
    assert gaps[0] == pytest.approx(0.1, abs=0.06)
    assert gaps == sorted(gaps)
    assert max(gaps) <= 2.1
    assert len(router.broken) == 1
    await router.session.close()


@virtual_time
async def test_failed_send_breaks_the_stream() -> None:
    router = Router()
    await router.session.start()
    router.streams[0].cancel()
    with pytest.raises(WorkerUnavailable, match="broke while sending"):
        await router.session.send("x")
    await settle()
    assert len(router.broken) == 1
    await router.session.close()


@virtual_time
async def test_frames_keep_the_session_alive() -> None:
    router = Router()
    await router.session.start()
    for _ in range(20):
        await asyncio.sleep(4)
        router.streams[0].incoming.put_nowait("beat")
    assert router.broken == []
    assert router.frames.count("beat") >= 19
    await router.session.close()


@pytest.mark.parametrize("error", [RuntimeError("a bug"), EngineFault("makes no sense")])
def test_frame_that_cannot_be_handled_breaks_the_stream_and_it_reconnects(error: Exception) -> None:
    """A reader that just ended would leave the link up and its requests waiting for ever."""

    @virtual_time
    async def run() -> None:
        router = Router()
        await router.session.start()
        router.frame_error = error
        router.streams[0].incoming.put_nowait("strange")
        await settle()
        assert [type(e) for e in router.broken] == [EngineFault]
        assert router.streams[0].is_cancelled
        assert not router.session.connected
        router.frame_error = None
        await asyncio.sleep(0.2)
        assert router.session.connected
        assert len(router.streams) == 2
        await router.session.close()

    run()


@virtual_time
async def test_bug_in_handling_a_frame_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    router = Router()
    await router.session.start()
    router.frame_error = RuntimeError("a bug")
    router.streams[0].incoming.put_nowait("strange")
    await settle()
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None
    await router.session.close()


@virtual_time
async def test_refused_first_frames_are_told_and_tried_again_with_backoff() -> None:
    router = Router()
    await router.session.start()
    router.frame_error = RuntimeError("a bug")
    router.streams[0].incoming.put_nowait("strange")
    await asyncio.sleep(30)
    assert 10 < len(router.streams) < 30
    assert len(router.broken) == len(router.streams)
    assert all(stream.is_cancelled for stream in router.streams)
    router.frame_error = None
    await asyncio.sleep(2.5)
    assert router.session.connected
    await router.session.close()


@virtual_time
async def test_start_raises_when_the_first_frame_is_refused() -> None:
    router = Router()
    router.frame_error = RuntimeError("a bug")
    with pytest.raises(EngineFault, match="RuntimeError: a bug"):
        await router.session.start()
    assert router.streams[0].is_cancelled
    assert len(router.broken) == 1


@virtual_time
async def test_bug_in_telling_the_break_does_not_end_the_session() -> None:
    router = Router()
    router.broken_error = RuntimeError("a bug")
    await router.session.start()
    router.streams[0].incoming.put_nowait(grpc.aio.EOF)
    await asyncio.sleep(0.2)
    assert router.session.connected
    await router.session.close()


@pytest.mark.parametrize("error", [asyncio.CancelledError(), ValueError("too large"), TimeoutError()])
def test_write_that_fails_in_whatever_way_breaks_the_stream(error: BaseException) -> None:
    """gRPC reports a call that ends during the write as a cancellation, which would end the sender."""

    @virtual_time
    async def run() -> None:
        router = Router()
        await router.session.start()
        stream = router.streams[0]
        stream.write_error = error
        if isinstance(error, asyncio.CancelledError):
            stream.cancel()
        with pytest.raises(WorkerUnavailable, match="broke while sending"):
            await router.session.send("x")
        await settle()
        assert len(router.broken) == 1
        await router.session.close()

    run()
