"""A supervised process is replaced, whatever ends it. Small stand-ins play the processes."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent

import pytest

from cluster.process_control import ProcessControl
from cluster.process_spec import ProcessSpec
from cluster.process_supervisor import MAX_FALSE_STARTS, Supervisor
from protocol.errors import StartupError, WorkerUnavailable
from protocol.ids import Role
from rpc import wait_until

STAND_IN = dedent("""
    import json, os, socket, sys
    path, launch, behaviour = sys.argv[1:]
    wire = socket.socket(socket.AF_UNIX)
    wire.connect(path)
    def say(**message):
        wire.sendall(json.dumps(message).encode() + b"\\n")
    say(hello=launch, pid=os.getpid())
    if behaviour == "cannot start":
        say(failed="no memory")
        sys.exit(1)
    if behaviour == "crashes":
        sys.exit(1)
    say(ready={"address": "127.0.0.1:1", "incarnation": launch})
    complaint = "worn out" if behaviour == "unfit" else None
    for line in wire.makefile():
        question = json.loads(line)
        if question["ask"] == "stop":
            break
        if behaviour != "silent":
            say(answer=question["id"], complaint=complaint)
""")


@dataclass
class Stage:
    """One supervised stand-in; the first `behaviours` in order, then good ones."""

    folder: Path
    control: ProcessControl
    behaviours: list[str] = field(default_factory=list)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    supervisors: list[Supervisor] = field(default_factory=list)
    breaks_at: int | None = None
    """The number of the launch that meets a bug."""

    def supervise(self, *behaviours: str, health_timeout_s: float | None = 10.0) -> Supervisor:
        self.behaviours = list(behaviours)
        supervisor = Supervisor(
            "decode-0",
            Role.DECODE,
            self._spec,
            self._launch,
            self.control,
            start_timeout_s=30,
            health_timeout_s=health_timeout_s,
        )
        self.supervisors.append(supervisor)
        supervisor.start()
        return supervisor

    def _spec(self, launch: str) -> ProcessSpec:
        return ProcessSpec(
            name="decode-0",
            launch=launch,
            role=Role.DECODE,
            config="{}",
            token="t",
            directory_address="",
            host="",
            port=0,
            control_path=str(self.control.path),
            log_path=str(self.folder / "log"),
            netns=None,
            environment={},
        )

    def _launch(self, spec: ProcessSpec) -> None:
        if len(self.started) + 1 == self.breaks_at:
            raise ZeroDivisionError("no more")
        behaviour = self.behaviours.pop(0) if self.behaviours else "good"
        command = [sys.executable, "-S", "-c", STAND_IN, spec.control_path, spec.launch, behaviour]
        self.started.append(subprocess.Popen(command))


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    control = ProcessControl(tmp_path / "control")
    await control.start()
    stage = Stage(tmp_path, control)
    yield stage
    for supervisor in stage.supervisors:
        await supervisor.stop()
        await supervisor.stop()
    for process in stage.started:
        process.wait(10)
    await control.stop()


async def until(condition: Callable[[], bool]) -> None:
    assert await wait_until(condition, 30)


async def test_a_killed_process_is_replaced_by_another_incarnation(stage: Stage) -> None:
    supervisor = stage.supervise()
    await until(lambda: supervisor.record.is_ready)
    first = supervisor.record
    supervisor.send_signal(signal.SIGKILL)
    await until(lambda: supervisor.record.is_ready and supervisor.record.num_starts == 2)
    assert supervisor.record.incarnation != first.incarnation
    assert supervisor.record.ended_because == "its process ended"
    assert await supervisor.leftovers(10) is None


@pytest.mark.parametrize(
    ("behaviour", "because"), [("unfit", "worn out"), ("silent", "did not answer for 0.3 s")]
)
async def test_an_unfit_or_silent_process_is_replaced(stage: Stage, behaviour: str, because: str) -> None:
    supervisor = stage.supervise(behaviour, health_timeout_s=0.3)
    await until(lambda: supervisor.record.is_ready and supervisor.record.num_starts == 2)
    assert supervisor.record.ended_because == because


async def test_a_stopped_process_is_left_alone_where_the_test_says_so(stage: Stage) -> None:
    supervisor = stage.supervise(health_timeout_s=None)
    await until(lambda: supervisor.record.is_ready)
    supervisor.send_signal(signal.SIGSTOP)
    with pytest.raises(WorkerUnavailable, match="did not answer"):
        await supervisor.leftovers(1.0)
    supervisor.send_signal(signal.SIGCONT)
    assert await supervisor.leftovers(10) is None
    assert supervisor.record.num_starts == 1


@pytest.mark.parametrize(
    ("behaviour", "because"), [("cannot start", "no memory"), ("crashes", "ended before it was ready")]
)
async def test_a_process_that_cannot_start_is_tried_again_and_then_given_up(
    stage: Stage, behaviour: str, because: str
) -> None:
    supervisor = stage.supervise(behaviour)
    await until(lambda: supervisor.record.is_ready)
    assert supervisor.record.ended_because.startswith(because)
    await supervisor.stop()
    hopeless = stage.supervise(*[behaviour] * MAX_FALSE_STARTS)
    await until(lambda: hopeless.fault is not None)
    assert f"decode-0: {because}" in str(hopeless.fault)
    assert hopeless.record.num_starts == MAX_FALSE_STARTS


async def test_a_removed_process_comes_back_when_it_is_restored(stage: Stage) -> None:
    supervisor = stage.supervise()
    await until(lambda: supervisor.record.is_ready)
    supervisor.remove()
    await until(lambda: supervisor.record.pid == 0)
    with pytest.raises(WorkerUnavailable, match="is being started"):
        supervisor.send_signal(signal.SIGSTOP)
    with pytest.raises(WorkerUnavailable, match="is being started"):
        await supervisor.leftovers(1)
    supervisor.restore()
    await until(lambda: supervisor.record.is_ready)


async def test_a_stopped_process_does_not_keep_the_cluster_from_its_end(stage: Stage) -> None:
    supervisor = stage.supervise(health_timeout_s=None)
    await until(lambda: supervisor.record.is_ready)
    supervisor.send_signal(signal.SIGSTOP)
    await supervisor.stop()
    assert stage.started[0].wait(10) is not None
    assert supervisor.survivors() == []


async def test_a_process_that_ends_with_its_hello_is_not_waited_for(stage: Stage) -> None:
    """It would have been waited for until the time for its start was over."""
    coming = asyncio.create_task(stage.control.connected("one", 600))
    await asyncio.sleep(0)
    gone = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", "")
    await gone.wait()
    _, writer = await asyncio.open_unix_connection(stage.control.path)
    writer.write(json.dumps({"hello": "one", "pid": gone.pid}).encode() + b"\n")
    with pytest.raises(StartupError, match="ended as soon as it had come up"):
        await coming
    writer.close()
    await writer.wait_closed()


async def test_a_supervisor_that_breaks_says_so(stage: Stage) -> None:
    """It would have ended in silence, and its process have had no successor."""
    supervisor = stage.supervise("crashes")
    stage.breaks_at = 2
    await until(lambda: supervisor.fault is not None)
    assert str(supervisor.fault) == "decode-0: its supervisor broke: ZeroDivisionError: no more"
    assert supervisor.record.ended_because == "its supervisor broke: ZeroDivisionError: no more"


async def test_a_question_to_a_process_that_has_just_ended_is_not_waited_for(stage: Stage) -> None:
    """It would have been asked into the void, and its successor come when the time was up."""
    spec = stage._spec("one")
    stage._launch(spec)
    link = await stage.control.connected("one", 30)
    await link.ready
    link.process.kill()
    await link.ended.wait()
    with pytest.raises(WorkerUnavailable, match="its process ended"):
        await link.ask("health", None)
