"""Who owns a worker's background tasks? One set, which reports crashes and ends them in bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from protocol.errors import EngineFault
from rpc.health import Health


class TaskSet:
    """Tasks of one worker. A task that ends with an exception makes the worker unfit."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        """Run `work` until it ends or the set is stopped."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            fault = EngineFault(f"{task.get_name()} crashed: {type(error).__name__}: {error}")
            fault.__cause__ = error
            self._health.report(fault)

    async def drain(self, timeout_s: float) -> bool:
        """Wait until all tasks have ended by themselves; False when some have not in time."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        return not self._tasks

    async def cancel(self, timeout_s: float) -> bool:
        """Cancel all tasks and wait; False when some did not end in time."""
        for task in set(self._tasks):
            task.cancel()
        return await self.drain(timeout_s)
