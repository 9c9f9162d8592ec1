"""What runs inside one process of a plain-process cluster: a worker of either role, or the directory.

It says over the control socket when it is ready, answers there whether it is fit and idle, and ends when
it is told to or when the other end is gone.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import signal
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

from cluster.environment import override
from cluster.grpc_directory import GrpcDirectory, serve_directory
from cluster.idleness import assert_worker_idle
from cluster.netns import enter_netns
from cluster.process_spec import ProcessSpec
from protocol.errors import SplitserveError
from protocol.ids import Role
from protocol.membership import WorkerRecord
from protocol.ports import Directory
from rpc import RunningServer

logger = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class Worker(Protocol):
    """What a process needs of a worker."""

    async def start(self, host: str, port: int) -> str: ...

    async def stop(self) -> None: ...

    def check_health(self) -> None: ...

    def record(self) -> WorkerRecord: ...

    def assert_idle(self) -> None: ...


Build = Callable[[ProcessSpec, Directory], Worker]
"""Makes a worker, loaded but not started. Raises `StartupError`."""


def build_worker(spec: ProcessSpec, directory: Directory) -> Worker:
    """The worker as every other cluster has it."""
    from cluster import compose

    build = compose.build_prefill_worker if spec.role is Role.PREFILL else compose.build_decode_worker
    worker: Worker = build(
        spec.cluster_config(),
        token=spec.token,
        directory=directory,
        replica_name=spec.name,
        host=spec.host,
    )
    return worker


class Inmate(Protocol):
    """What lives in a process."""

    async def start(self) -> dict[str, str]:
        """Raises `StartupError`. Returns what the supervisor is told."""

    def fault(self) -> str | None:
        """Why it must be replaced."""

    def leftovers(self) -> str | None:
        """Why it is not idle."""

    async def stop(self) -> None: ...


class WorkerInmate:
    """A worker of either role."""

    def __init__(self, spec: ProcessSpec) -> None:
        self._spec = spec
        self._directory = GrpcDirectory(spec.directory_address, spec.token)
        self._worker = self._build()

    def _build(self) -> Worker:
        from cluster.serve_replica import collecting_no_garbage

        module, _, function = self._spec.build.partition(":")
        build: Build = getattr(import_module(module), function)
        with collecting_no_garbage():
            return build(self._spec, self._directory)

    async def start(self) -> dict[str, str]:
        address = await self._worker.start(self._spec.host, self._spec.port)
        return {"address": address, "incarnation": self._worker.record().identity.incarnation}

    def fault(self) -> str | None:
        return _complaint(self._worker.check_health)

    def leftovers(self) -> str | None:
        return _complaint(lambda: assert_worker_idle(self._worker))

    async def stop(self) -> None:
        await self._worker.stop()
        await self._directory.close()


class DirectoryInmate:
    """The directory."""

    def __init__(self, spec: ProcessSpec) -> None:
        self._spec = spec
        self._server: RunningServer | None = None

    async def start(self) -> dict[str, str]:
        self._server = await serve_directory(self._spec.host, self._spec.port, self._spec.token)
        return {"address": self._server.address, "incarnation": self._spec.launch}

    def fault(self) -> str | None:
        return None

    def leftovers(self) -> str | None:
        return None

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0.0)


def run_process(spec: ProcessSpec) -> int:
    """Be that process until its end. Returns the exit code."""
    _set_up(spec)
    try:
        return asyncio.run(_live(spec))
    except Exception:  # into its log, whatever it is; the code tells whoever waits for the process
        logger.exception("ended")
        return 1


async def _live(spec: ProcessSpec) -> int:
    reader, writer = await asyncio.open_unix_connection(spec.control_path)
    _say(writer, hello=spec.launch, pid=os.getpid())
    inmate: Inmate
    try:
        if spec.netns is not None:
            enter_netns(spec.netns)
        inmate = DirectoryInmate(spec) if spec.role is None else WorkerInmate(spec)
        _say(writer, ready=await inmate.start())
    except Exception as error:
        known = isinstance(error, SplitserveError)
        _say(writer, failed=str(error) if known else f"{type(error).__name__}: {error}")
        await writer.drain()
        raise
    await _answer(reader, writer, inmate)
    await inmate.stop()
    return 0


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, inmate: Inmate) -> None:
    """Until told to stop, or until the supervisor is gone."""
    answers: dict[str, Callable[[], str | None]] = {"health": inmate.fault, "idle": inmate.leftovers}
    while line := await reader.readline():
        question: dict[str, Any] = json.loads(line)
        if question["ask"] == "stop":
            return
        _say(writer, answer=question["id"], complaint=answers[question["ask"]]())


def _say(writer: asyncio.StreamWriter, **message: object) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


def _complaint(check: Callable[[], None]) -> str | None:
    try:
        check()
    except SplitserveError as error:
        return error.message
    return None


def _set_up(spec: ProcessSpec) -> None:
    """Logs to its file, and tells its stacks on SIGUSR1."""
    log = os.open(spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, force=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    override(spec.environment)
