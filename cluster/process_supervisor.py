"""One process of a plain-process cluster over all its lives: start, watch, end, start again.

launching ──connected──> starting ──ready──> running ──ended, unfit, silent──> ended ──> launching
                \\── cannot start: again after a pause, MAX_FALSE_STARTS times ──/
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.process_control import ProcessControl, ProcessLink
from cluster.process_spec import ProcessSpec
from protocol.errors import StartupError, WorkerUnavailable
from protocol.ids import Role

logger = logging.getLogger(__name__)

HEALTH_PERIOD_S = 0.25
STOP_S = 8.0
"""A worker bounds its own end below this, unless it hangs."""
UNFIT_STOP_S = 2.0
MAX_FALSE_STARTS = 5
MAX_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One look at a process of the cluster."""

    name: str
    role: Role | None
    """None: the directory."""
    pid: int
    """0: it is being started."""
    incarnation: str
    address: str
    """Empty until it is ready."""
    num_starts: int
    log_path: Path
    ended_because: str
    """Why its predecessor ended; empty for the first."""

    @property
    def is_ready(self) -> bool:
        return bool(self.address)


class Supervisor:
    """Keeps one process alive. Used on one event loop."""

    def __init__(
        self,
        name: str,
        role: Role | None,
        make_spec: Callable[[str], ProcessSpec],
        launch: Callable[[ProcessSpec], None],
        control: ProcessControl,
        *,
        start_timeout_s: float,
        health_timeout_s: float | None,
    ) -> None:
        """`make_spec` gets the launch's own name; `launch` starts a process that connects to `control`,
        or raises `StartupError`."""
        self.name = name
        self.fault: StartupError | None = None
        """Why it is started no more."""
        self._role = role
        self._make_spec = make_spec
        self._launch = launch
        self._control = control
        self._start_timeout_s = start_timeout_s
        self._health_timeout_s = health_timeout_s
        self._link: ProcessLink | None = None
        self._ready: dict[str, str] = {}
        self._num_starts = 0
        self._num_false_starts = 0
        self._ended_because = ""
        self._log_path = Path()
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._task: asyncio.Task[None] | None = None
        self._seen: list[psutil.Process] = []

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"supervise {self.name}")

    async def stop(self) -> None:
        """End the process and start no other. Bounded, idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        self._may_run.clear()
        link = self._link
        if link is not None and self._ready:
            await self._end(link, STOP_S)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    @property
    def record(self) -> ProcessRecord:
        return ProcessRecord(
            name=self.name,
            role=self._role,
            pid=self._link.process.pid if self._link is not None else 0,
            incarnation=self._ready.get("incarnation", ""),
            address=self._ready.get("address", ""),
            num_starts=self._num_starts,
            log_path=self._log_path,
            ended_because=self._ended_because,
        )

    def survivors(self) -> list[int]:
        """Pids of all its lives that still run."""
        return [process.pid for process in self._seen if process.is_running()]

    def send_signal(self, number: int) -> None:
        """Raises `WorkerUnavailable` when there is no process now."""
        if self._link is None:
            raise WorkerUnavailable(f"{self.name} is being started")
        with contextlib.suppress(psutil.NoSuchProcess):
            self._link.process.send_signal(number)

    def remove(self) -> None:
        """kill -9, and start no other until `restore`."""
        self._may_run.clear()
        if self._link is not None:
            self.send_signal(signal.SIGKILL)

    def restore(self) -> None:
        self._may_run.set()

    async def leftovers(self, timeout_s: float) -> str | None:
        """Why it is not idle. Raises `WorkerUnavailable` when it does not answer."""
        if self._link is None or not self._ready:
            raise WorkerUnavailable(f"{self.name} is being started")
        return await self._link.ask("idle", timeout_s)

    async def _run(self) -> None:
        """Until there is a fault, which may be one of this supervisor itself: nobody else would see it."""
        while self.fault is None:
            await self._may_run.wait()
            try:
                self._ended_because = await self._live()
                self._num_false_starts = 0
            except StartupError as error:
                await self._pause_after(error)
            except Exception as error:
                self._give_up(error)
            logger.info("%s ended: %s", self.name, self._ended_because)

    def _give_up(self, error: Exception) -> None:
        logger.exception("%s is not supervised any more", self.name)
        self._ended_because = f"its supervisor broke: {type(error).__name__}: {error}"
        self.fault = StartupError(f"{self.name}: {self._ended_because}")
        self.fault.__cause__ = error

    async def _pause_after(self, error: StartupError) -> None:
        self._ended_because = error.message
        self._num_false_starts += 1
        if self._num_false_starts == MAX_FALSE_STARTS:
            self.fault = StartupError(f"{self.name}: {error.message}")
        else:
            await asyncio.sleep(min(0.1 * 2**self._num_false_starts, MAX_PAUSE_S))

    async def _live(self) -> str:
        """One life. Returns why it ended. Raises `StartupError` when it never was ready."""
        spec = self._make_spec(secrets.token_hex(4))
        self._log_path = Path(spec.log_path)
        self._num_starts += 1
        self._launch(spec)
        link = self._link = await self._control.connected(spec.launch, self._start_timeout_s)
        self._seen = [process for process in self._seen if process.is_running()] + [link.process]
        try:
            async with asyncio.timeout(self._start_timeout_s):
                self._ready = await link.ready
            return await self._watch(link)
        except TimeoutError as error:
            raise StartupError(f"not ready after {self._start_timeout_s:g} s; see its log") from error
        finally:
            self._link, self._ready = None, {}
            _kill(link.process)

    async def _watch(self, link: ProcessLink) -> str:
        """Until it ends, or must."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_PERIOD_S):
                    await link.ended.wait()
                    return "its process ended"
            try:
                complaint = await link.ask("health", self._health_timeout_s)
            except WorkerUnavailable as error:
                return error.message
            if complaint is not None:
                await self._end(link, UNFIT_STOP_S)
                return complaint

    async def _end(self, link: ProcessLink, grace_s: float) -> None:
        """Politely, then not."""
        with contextlib.suppress(psutil.NoSuchProcess):
            link.process.send_signal(signal.SIGCONT)
        link.say(ask="stop")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await link.ended.wait()
        _kill(link.process)


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
