"""The supervisor's end of the control socket: who has come up, and what they answer.

A connection is a process: it ends with it, however the process ends. The socket is a file, so that it
reaches into network namespaces, and is not cut when their networks are.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from protocol.errors import StartupError, WorkerUnavailable

LINE_LIMIT_BYTES = 1 << 20


@dataclass(slots=True)
class ProcessLink:
    """One connected process. Used on one event loop."""

    process: psutil.Process
    writer: asyncio.StreamWriter
    ready: asyncio.Future[dict[str, str]]
    """What it said when it was ready; `StartupError` when it cannot start or ended before."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _answers: dict[int, asyncio.Future[str | None]] = field(default_factory=dict)
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    async def ask(self, question: str, timeout_s: float | None) -> str | None:
        """Its complaint, or None. Raises `WorkerUnavailable` when it does not answer in time, or ends.

        Without a time limit it waits for its answer or its end, whichever comes.
        """
        if self.ended.is_set():  # nobody would ever answer
            raise WorkerUnavailable("its process ended")
        number = next(self._ids)
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self.say(ask=question, id=number)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise WorkerUnavailable(f"did not answer for {timeout_s:g} s") from error
        finally:
            del self._answers[number]

    def say(self, **message: object) -> None:
        """Never blocks; what a dead process is told is lost."""
        self.writer.write(json.dumps(message).encode() + b"\n")

    def hear(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            _resolve(self.ready, message["ready"])
        elif "failed" in message:
            self._cannot_start(message["failed"])
        elif (answer := self._answers.get(message["answer"])) is not None:
            _resolve(answer, message["complaint"])

    def end(self) -> None:
        """The connection is closed."""
        self.ended.set()
        self.writer.close()
        self._cannot_start("ended before it was ready; see its log")
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(WorkerUnavailable("its process ended"))

    def _cannot_start(self, why: str) -> None:
        if not self.ready.done():
            self.ready.set_exception(StartupError(why))
            self.ready.exception()  # whoever waits hears of it; nobody need


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


class ProcessControl:
    """Listens for the processes of one cluster. Used on one event loop."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._server: asyncio.Server | None = None
        self._expected: dict[str, asyncio.Future[ProcessLink]] = {}
        self._conversations: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._converse, self.path, limit=LINE_LIMIT_BYTES)

    async def stop(self) -> None:
        """The processes have ended before. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            await server.wait_closed()
        if self._conversations:
            await asyncio.wait(self._conversations, timeout=1.0)

    async def connected(self, launch: str, timeout_s: float) -> ProcessLink:
        """The process of this launch. Raises `StartupError` when it does not come, or is gone at once."""
        expected: asyncio.Future[ProcessLink] = asyncio.get_running_loop().create_future()
        self._expected[launch] = expected
        try:
            async with asyncio.timeout(timeout_s):
                return await expected
        except TimeoutError as error:
            raise StartupError(f"did not come up within {timeout_s:g} s; see its log") from error
        finally:
            del self._expected[launch]

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "streams run their callbacks in tasks"  # noqa: S101
        self._conversations.add(task)
        task.add_done_callback(self._conversations.discard)
        hello = await _next_message(reader)
        expected = self._expected.get(hello["hello"]) if hello else None
        if hello is None or expected is None or expected.done():
            writer.close()  # it comes too late: it ends when it notices
            return
        try:
            process = psutil.Process(hello["pid"])
        except psutil.NoSuchProcess:  # it ended between its hello and this look
            writer.close()
            expected.set_exception(StartupError("ended as soon as it had come up; see its log"))
            return
        ready: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        link = ProcessLink(process, writer, ready)
        expected.set_result(link)
        try:
            while (message := await _next_message(reader)) is not None:
                link.hear(message)
        finally:
            link.end()


async def _next_message(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    try:
        line = await reader.readline()
    except ConnectionError:
        return None
    message: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
    return message
