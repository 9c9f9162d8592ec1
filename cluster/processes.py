"""A cluster of plain processes without Ray: for soaks, fault tests, and hosts that are network namespaces.

    async with ProcessCluster(config) as cluster:      # directory and workers: processes; the router: here
        async with cluster.http() as url: ...          # OpenAI API; `cluster.router` is the `Router`
        victim = cluster.kill("prefill-0")             # kill -9; it is replaced by itself
        await cluster.wait_until_replaced(victim, timeout_s=10)
        cluster.pause("decode-0"); cluster.resume("decode-0")      # SIGSTOP, SIGCONT
        await cluster.drain("decode-1", limit_s=30)    # over gRPC, as `splitserve drain` does
        cluster.remove("prefill-0"); cluster.restore("prefill-0")  # kill -9 without a successor, until then
        cluster.processes()                            # names, pids, incarnations, addresses, log files
        await cluster.wait_until_idle(timeout_s=20)    # every process's own leak check, and the router's
    # here no process is left, or `EngineFault` was raised

Names are "directory", "prefill-0", ..., "decode-0", ...; they stay while incarnations change. A process
that ends, that says it is unfit, or that does not answer for `health_timeout_s` is ended and replaced,
so a test that pauses a worker for longer sets that to None. The directory comes back on its old address.

All are forked from one warm process that has torch, gRPC and NIXL loaded, so that a replacement is there
within about a second, in a network namespace as well. There give a `Place.host` that the others can
reach (the directory, too), and keep UCX off shared memory, which no cut would reach:
`Place(host="10.0.0.2", netns="p0", environment={"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"})`.

`build="module:function"` replaces how a worker is made in its process (`process_main.Build`), e.g. for
one with a transport that injects faults. SIGUSR1 makes a worker write all its stacks to its log.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from cluster import compose
from cluster.admin import drain_worker
from cluster.config import ClusterConfig
from cluster.grpc_directory import GrpcDirectory
from cluster.local_http import serve_http
from cluster.process_control import ProcessControl
from cluster.process_launcher import ForkLauncher
from cluster.process_spec import DEFAULT_BUILD, Place, ProcessSpec
from cluster.process_supervisor import ProcessRecord, Supervisor
from protocol.errors import EngineFault, SplitserveError, StartupError
from protocol.ids import Role
from rpc import Dial, wait_until

if TYPE_CHECKING:
    from router.router import Router

__all__ = ["DIRECTORY", "Place", "ProcessCluster", "ProcessRecord"]

DIRECTORY = "directory"
LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 180.0
READY_TIMEOUT_S = 200.0
ASK_TIMEOUT_S = 5.0
POLL_S = 0.02
ON_LOOPBACK = {"UCX_NET_DEVICES": "lo"}
"""NIXL's UCX would listen on all of the machine's networks; peers of the same machine need none."""


class ProcessCluster:
    """See above. Used on one event loop, whose thread must outlive it: the kernel ends the processes
    with the thread that started them, so that none can be left behind."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        places: Mapping[str, Place] | None = None,
        build: str = DEFAULT_BUILD,
        health_timeout_s: float | None = 10.0,
        log_dir: Path | None = None,
        dial: Dial | None = None,
    ) -> None:
        """`places` by process name. Logs go to `log_dir`, which is kept; else they vanish at the end.
        `dial` is how the router opens its channels to workers, as for `compose.build_router`."""
        self.config = config
        """May be exchanged: processes that start from then on get the new one."""
        self.token = secrets.token_hex(16)
        self._places = dict(places or {})
        self._build = build
        self._health_timeout_s = health_timeout_s
        self._log_dir = log_dir
        self._dial = dial
        self._ends = AsyncExitStack()
        self._directory_address = ""
        self._supervisors: dict[str, Supervisor] = {}
        self._router: Router | None = None
        self._folder = Path()

    @property
    def router(self) -> Router:
        assert self._router is not None, "the cluster was started"  # noqa: S101
        return self._router

    @property
    def directory_address(self) -> str:
        """host:port; with `token`, further processes can take part."""
        return self._directory_address

    async def __aenter__(self) -> ProcessCluster:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything; returns once a hand-off has succeeded. Raises `StartupError`."""
        try:
            await self._start()
            await self.wait_until_ready(READY_TIMEOUT_S)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End everything, whatever state it is in. Bounded, idempotent.

        Raises `EngineFault` when a process is left.
        """
        await self._ends.aclose()
        left = {name: pids for name, s in self._supervisors.items() if (pids := s.survivors())}
        if left:
            raise EngineFault(f"processes are left: {left}")

    @asynccontextmanager
    async def http(self) -> AsyncIterator[str]:
        """Serve the OpenAI API as configured; gives the base URL. Raises `StartupError`."""
        async with serve_http(self.config, self.router) as url:
            yield url

    def processes(self) -> tuple[ProcessRecord, ...]:
        """All, the directory first."""
        return tuple(supervisor.record for supervisor in self._supervisors.values())

    def workers(self, role: Role | None = None) -> tuple[ProcessRecord, ...]:
        """Those that are workers, of one role or of both."""
        return tuple(p for p in self.processes() if p.role is not None and role in (None, p.role))

    def process(self, name: str) -> ProcessRecord:
        return self._supervisors[name].record

    def kill(self, name: str) -> ProcessRecord:
        """kill -9. Returns the victim. Raises `WorkerUnavailable` when it is just being started."""
        return self._signal(name, signal.SIGKILL)

    def pause(self, name: str) -> ProcessRecord:
        """SIGSTOP: it is there, and does nothing. Raises as `kill` does."""
        return self._signal(name, signal.SIGSTOP)

    def resume(self, name: str) -> ProcessRecord:
        """SIGCONT. Raises as `kill` does."""
        return self._signal(name, signal.SIGCONT)

    def remove(self, name: str) -> ProcessRecord:
        """kill -9, and no successor until `restore`."""
        victim = self.process(name)
        self._supervisors[name].remove()
        return victim

    def restore(self, name: str) -> None:
        self._supervisors[name].restore()

    async def drain(self, name: str, limit_s: float) -> ProcessRecord:
        """Tell a worker to take no new work; returns at once. Once empty it is replaced.

        Raises `SplitserveError` when it does not hear it.
        """
        victim = self.process(name)
        await drain_worker(victim.address, self.token, limit_s)
        return victim

    async def wait_until_replaced(self, victim: ProcessRecord, timeout_s: float) -> ProcessRecord:
        """Until another incarnation is ready. Raises `StartupError` when none is in time."""

        def is_replaced() -> bool:
            self._raise_fault()
            now = self.process(victim.name)
            return now.is_ready and now.incarnation != victim.incarnation

        if not await wait_until(is_replaced, timeout_s, POLL_S):
            raise StartupError(f"{victim.name} was not replaced within {timeout_s:g} s")
        return self.process(victim.name)

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Until all processes are there and a hand-off has succeeded. Raises `StartupError`."""

        def is_ready() -> bool:
            self._raise_fault()
            return self._not_ready_because() is None

        if not await wait_until(is_ready, timeout_s, POLL_S):
            raise StartupError(f"not ready after {timeout_s:g} s: {self._not_ready_because()}")

    async def assert_idle(self) -> None:
        """Raise unless no request is anywhere and every KV block of every worker is free."""
        self.router.assert_idle()
        for name, supervisor in self._supervisors.items():
            complaint = await supervisor.leftovers(ASK_TIMEOUT_S)
            if complaint is not None:
                raise EngineFault(f"{name}: {complaint}")

    async def wait_until_idle(self, timeout_s: float) -> None:
        """Give what was cancelled the time to end. Raises what `assert_idle` raises at the end of it."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                return await self.assert_idle()
            except (SplitserveError, AssertionError):
                if asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(0.1)

    async def _start(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="splitserve-")
        self._ends.callback(folder.cleanup)
        self._folder = Path(folder.name)
        compose.open_model(self.config)  # once, before every worker would convert it
        control = ProcessControl(self._folder / "control")
        await control.start()
        self._ends.push_async_callback(control.stop)
        forks = ForkLauncher(ON_LOOPBACK)
        self._ends.push_async_callback(asyncio.to_thread, forks.stop)
        self._add_supervisor(DIRECTORY, None, forks, control)
        self._directory_address = (await self._came_up(DIRECTORY)).address
        self._ends.push_async_callback(self._stop_workers)
        roles = {
            f"{role.value}-{i}": role for role in Role for i in range(self.config.pool(role).num_workers)
        }
        for name, role in roles.items():
            self._add_supervisor(name, role, forks, control)
            if len(self._supervisors) == 2:  # the first worker compiles what the others then find
                await self._came_up(name)
        await self._start_router()

    async def _came_up(self, name: str) -> ProcessRecord:
        def is_decided() -> bool:
            self._raise_fault()
            return self.process(name).is_ready

        if not await wait_until(is_decided, START_TIMEOUT_S, POLL_S):
            raise StartupError(f"{name} did not start: {self.process(name).ended_because}")
        return self.process(name)

    async def _start_router(self) -> None:
        directory = GrpcDirectory(self._directory_address, self.token)
        self._ends.push_async_callback(directory.close)
        self._router = compose.build_router(
            self.config, token=self.token, directory=directory, dial=self._dial
        )
        self._ends.push_async_callback(self._router.stop)
        await self._router.start()

    def _add_supervisor(
        self, name: str, role: Role | None, forks: ForkLauncher, control: ProcessControl
    ) -> None:
        place = self._places.get(name, Place())
        supervisor = self._supervisors[name] = Supervisor(
            name,
            role,
            partial(self._spec, name, role, place, control.path),
            forks.launch,
            control,
            start_timeout_s=START_TIMEOUT_S,
            health_timeout_s=self._health_timeout_s,
        )
        supervisor.start()
        if role is None:
            self._ends.push_async_callback(supervisor.stop)

    async def _stop_workers(self) -> None:
        """All at once; the directory lives on until they have withdrawn."""
        workers = [s for s in self._supervisors.values() if s.name != DIRECTORY]
        await asyncio.gather(*(supervisor.stop() for supervisor in workers))

    def _spec(
        self, name: str, role: Role | None, place: Place, control_path: Path, launch: str
    ) -> ProcessSpec:
        pool_host = LOOPBACK if role is None else self.config.pool(role).host
        log_dir = self._log_dir or self._folder
        port = int(self._directory_address.rpartition(":")[2] or 0) if role is None else 0
        return ProcessSpec(
            name=name,
            launch=launch,
            role=role,
            config=self.config.model_dump_json(),
            token=self.token,
            directory_address=self._directory_address,
            host=place.host or (LOOPBACK if pool_host == "auto" else pool_host),
            port=port,
            control_path=str(control_path),
            log_path=str(log_dir / f"{name}.log"),
            netns=place.netns,
            environment=place.environment,
            build=self._build,
        )

    def _signal(self, name: str, number: int) -> ProcessRecord:
        victim = self.process(name)
        self._supervisors[name].send_signal(number)
        return victim

    def _raise_fault(self) -> None:
        for supervisor in self._supervisors.values():
            if supervisor.fault is not None:
                raise supervisor.fault

    def _not_ready_because(self) -> str | None:
        missing = [process for process in self.processes() if not process.is_ready]
        if missing:
            return ", ".join(f"{p.name} ({p.ended_because or 'is being started'})" for p in missing)
        return self.router.not_ready_because()
