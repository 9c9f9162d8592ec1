"""What callers see when calls and streams go wrong on purpose, and what their peers see."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest

from protocol.errors import LeaseExpired, SplitserveError, WorkerUnavailable
from protocol.wire import splitserve_pb2 as pb
from protocol.wire.splitserve_pb2_grpc import (
    DecodeWorkerServicer,
    DecodeWorkerStub,
    PrefillWorkerServicer,
    PrefillWorkerStub,
    add_DecodeWorkerServicer_to_server,
    add_PrefillWorkerServicer_to_server,
)
from rpc import (
    CallFaultKind,
    CallFaults,
    FaultyDial,
    FrameOutbox,
    WorkerSession,
    abort,
    rpc_errors,
    run_session,
    start_server,
)

TOKEN = "one secret"  # noqa: S105
LIMIT_S = 10.0
SHORT_S = 0.05


class CountingOwner(PrefillWorkerServicer):
    """Answers the n-th renewal with n tokens."""

    def __init__(self) -> None:
        self.num_renewals = 0
        self.fails = False

    async def Renew(self, request: Any, context: Any) -> pb.RenewReply:  # type: ignore[override]
        self.num_renewals += 1
        if self.fails:
            await abort(context, LeaseExpired("gone"))
        return pb.RenewReply(held=True, tokens_ready=self.num_renewals)


class EchoingWorker(DecodeWorkerServicer):
    """Answers each submission with its request's id."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def Serve(self, commands: Any, context: Any) -> None:  # type: ignore[override]
        outbox = FrameOutbox(pb.DecodeFrame, lambda frame: None, heartbeat_s=60.0)

        def on_command(command: pb.DecodeCommand) -> None:
            request_id = command.submit.request.request_id
            self.seen.append(request_id)
            outbox.pending().deltas.add(request_id=request_id)

        await run_session(commands, on_command, outbox, context.write)


class Scene:
    """A caller whose calls go wrong as scripted, and both kinds of workers."""

    def __init__(
        self, dial: FaultyDial, channel: grpc.aio.Channel, owner: CountingOwner, worker: EchoingWorker
    ) -> None:
        self.dial = dial
        self.owner = owner
        self.worker = worker
        self.prefill: Any = PrefillWorkerStub(channel)
        self.decode: Any = DecodeWorkerStub(channel)

    def script(self, method: str, *fates: CallFaultKind | None, delay_s: float = 0.0) -> None:
        for fate in fates:
            self.dial.plans[method].script(fate, delay_s)

    def script_next_frame(self, fate: CallFaultKind, delay_s: float = 0.0) -> None:
        self.dial.received["Serve"].script(fate, delay_s)

    async def renew(self, timeout: float | None = LIMIT_S) -> int:
        with rpc_errors("the owner"):
            reply = await self.prefill.Renew(pb.RenewRequest(), timeout=timeout)
        return int(reply.tokens_ready)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    dial = FaultyDial(CallFaults(), "tests")
    owner, worker = CountingOwner(), EchoingWorker()
    registrars = [
        partial(add_PrefillWorkerServicer_to_server, owner),
        partial(add_DecodeWorkerServicer_to_server, worker),
    ]
    running = await start_server(registrars, "127.0.0.1", 0, TOKEN)
    async with dial(running.address, TOKEN) as channel:
        yield Scene(dial, channel, owner, worker)
    await running.stop(0.0)


class Line:
    """A session whose frames and end are kept."""

    def __init__(self, scene: Scene, frame_timeout_s: float) -> None:
        self.echoes: asyncio.Queue[str] = asyncio.Queue()
        self.broken: asyncio.Queue[SplitserveError] = asyncio.Queue()
        self.session: WorkerSession[pb.DecodeCommand, pb.DecodeFrame] = WorkerSession(
            scene.decode.Serve, self._on_frame, self.broken.put_nowait, time.monotonic, frame_timeout_s
        )

    def _on_frame(self, frame: pb.DecodeFrame) -> None:
        for delta in frame.deltas:
            self.echoes.put_nowait(delta.request_id)

    async def submit(self, name: str) -> None:
        submit = pb.DecodeSubmit(request=pb.Request(request_id=name))
        await self.session.send(pb.DecodeCommand(submit=submit))


@asynccontextmanager
async def line(scene: Scene, frame_timeout_s: float = LIMIT_S) -> AsyncIterator[Line]:
    opened = Line(scene, frame_timeout_s)
    await opened.session.start()
    async with asyncio.timeout(LIMIT_S):
        yield opened
    await opened.session.close()


async def test_a_call_without_fault_is_as_ever(scene: Scene) -> None:
    assert [await scene.renew(), await scene.renew()] == [1, 2]


async def test_a_dropped_call_never_reaches_the_peer_and_ends_at_its_time_limit(scene: Scene) -> None:
    scene.script("Renew", CallFaultKind.DROP)
    with pytest.raises(WorkerUnavailable, match="deadline exceeded"):
        await scene.renew(timeout=SHORT_S)
    assert scene.owner.num_renewals == 0
    assert await scene.renew() == 1


async def test_a_dropped_call_without_time_limit_waits_for_ever(scene: Scene) -> None:
    scene.script("Renew", CallFaultKind.DROP)
    call = asyncio.create_task(scene.renew(timeout=None))
    await asyncio.wait([call], timeout=SHORT_S)
    assert not call.done()
    call.cancel()
    await asyncio.wait([call])


@pytest.mark.parametrize("fails", [False, True])
async def test_a_lost_reply_leaves_the_caller_without_one_after_the_peer_did_it(
    scene: Scene, fails: bool
) -> None:
    await scene.renew()  # connected, so that the short time limit is none for that
    scene.owner.fails = fails
    scene.script("Renew", CallFaultKind.LOSE_REPLY)
    with pytest.raises(WorkerUnavailable, match="deadline exceeded"):
        await scene.renew(timeout=0.5)
    assert scene.owner.num_renewals == 2


async def test_a_duplicated_call_is_done_twice_and_answered_once(scene: Scene) -> None:
    scene.script("Renew", CallFaultKind.DUPLICATE)
    assert await scene.renew() in {1, 2}
    assert scene.owner.num_renewals == 2


async def test_a_duplicated_call_that_fails_fails_as_ever(scene: Scene) -> None:
    scene.owner.fails = True
    scene.script("Renew", CallFaultKind.DUPLICATE)
    with pytest.raises(LeaseExpired, match="gone"):
        await scene.renew()


async def test_a_delayed_call_is_answered(scene: Scene) -> None:
    scene.script("Renew", CallFaultKind.DELAY, delay_s=SHORT_S)
    assert await scene.renew() == 1


async def test_a_call_that_is_delayed_beyond_its_time_limit_never_leaves(scene: Scene) -> None:
    scene.script("Renew", CallFaultKind.DELAY, delay_s=LIMIT_S)
    with pytest.raises(WorkerUnavailable, match="deadline exceeded"):
        await scene.renew(timeout=SHORT_S)
    assert scene.owner.num_renewals == 0


async def test_a_disconnected_call_fails_at_once_and_the_next_one_works(scene: Scene) -> None:
    scene.script("Renew", CallFaultKind.DISCONNECT)
    with pytest.raises(WorkerUnavailable, match="unavailable"):
        await scene.renew()
    assert await scene.renew() == 1


async def test_other_methods_have_fates_of_their_own(scene: Scene) -> None:
    scene.script("Release", CallFaultKind.DISCONNECT)
    assert await scene.renew() == 1


async def test_delayed_messages_arrive_late_and_in_order(scene: Scene) -> None:
    async with line(scene) as router:
        scene.script("Serve", CallFaultKind.DELAY, delay_s=SHORT_S)
        await asyncio.gather(*(router.submit(name) for name in "abc"))
        assert [await router.echoes.get() for _ in range(3)] == ["a", "b", "c"]


async def test_a_stream_that_breaks_is_told_and_opened_anew(scene: Scene) -> None:
    async with line(scene) as router:
        scene.script("Serve", CallFaultKind.DISCONNECT)
        with pytest.raises(WorkerUnavailable):
            await router.submit("a")
        assert isinstance(await router.broken.get(), WorkerUnavailable)
        while not router.session.connected:  # noqa: ASYNC110  # nobody signals it
            await asyncio.sleep(0.01)
        await router.submit("b")
        assert await router.echoes.get() == "b"
        assert scene.worker.seen == ["b"]


async def test_a_stream_that_breaks_while_it_is_read_is_told(scene: Scene) -> None:
    async with line(scene) as router:
        scene.script_next_frame(CallFaultKind.DISCONNECT)
        await router.submit("a")
        error = await router.broken.get()
        assert isinstance(error, WorkerUnavailable)
        assert router.echoes.empty()


async def test_a_silent_stream_takes_messages_to_nobody_and_is_found_by_its_silence(scene: Scene) -> None:
    async with line(scene, frame_timeout_s=0.5) as router:
        scene.script("Serve", CallFaultKind.DROP)
        await router.submit("a")
        await router.submit("b")
        assert "silent" in (await router.broken.get()).message
        assert scene.worker.seen == []


async def test_a_frame_that_comes_late_is_read_late(scene: Scene) -> None:
    async with line(scene) as router:
        scene.script_next_frame(CallFaultKind.DELAY, SHORT_S)
        await router.submit("a")
        assert await router.echoes.get() == "a"


async def test_a_frame_that_comes_too_late_is_never_seen(scene: Scene) -> None:
    async with line(scene, frame_timeout_s=0.5) as router:
        scene.script_next_frame(CallFaultKind.DELAY, LIMIT_S)
        await router.submit("a")
        assert "silent" in (await router.broken.get()).message
        assert router.echoes.empty()


async def test_frames_behind_a_silent_cut_are_never_seen(scene: Scene) -> None:
    async with line(scene, frame_timeout_s=0.5) as router:
        scene.script_next_frame(CallFaultKind.DROP)
        await router.submit("a")
        assert "silent" in (await router.broken.get()).message
        assert scene.worker.seen == ["a"]
        assert router.echoes.empty()


def test_every_caller_has_fates_of_its_own_that_are_the_same_in_every_run() -> None:
    faults = CallFaults({"Renew": {CallFaultKind.DROP: 0.5}}, seed=3)
    plans = [faults.plans(caller)["Renew"] for caller in ("d0", "d0", "d1")]
    first, again, other = ([plan.take() for _ in range(50)] for plan in plans)
    assert first == again
    assert first != other
    assert faults.plans("d0")["Release"].take() is None


@pytest.mark.parametrize(
    ("method", "kind", "complaint"),
    [
        ("Juggle", CallFaultKind.DROP, "no method 'Juggle', only .*Renew"),
        ("Serve", CallFaultKind.DUPLICATE, "stream, which knows no duplicate"),
        ("Serve", CallFaultKind.LOSE_REPLY, "stream, which knows no lose_reply"),
    ],
)
def test_faults_that_cannot_be_are_refused(method: str, kind: CallFaultKind, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        CallFaults({method: {kind: 0.1}})


def test_impossible_rates_are_refused() -> None:
    with pytest.raises(ValueError, match="rates"):
        CallFaults({"Renew": {CallFaultKind.DROP: 1.5}})
