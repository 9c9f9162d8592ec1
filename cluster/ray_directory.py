"""The directory of a Ray cluster: a named actor, and the client that workers and routers hold.

The actor keeps nothing on disk. Workers announce themselves each second, so that an actor that was
restarted, or made anew by whoever needed it first, knows the whole cluster again a second later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.background import Background
from cluster.directory import DirectoryState
from protocol.errors import WorkerUnavailable
from protocol.ids import WorkerIdentity
from protocol.membership import WorkerRecord

NAMESPACE = "splitserve"
LOOKUP_POLL_S = 0.02
_NAME = "directory"


class DirectoryActor:
    """Holds the one `DirectoryState` of a cluster; Ray runs its methods one by one."""

    def __init__(self) -> None:
        self._state = DirectoryState(time.monotonic)

    def announce(self, record: WorkerRecord) -> None:
        self._state.announce(record)

    def withdraw(self, identity: WorkerIdentity) -> None:
        self._state.withdraw(identity)

    def workers(self) -> tuple[WorkerRecord, ...]:
        return self._state.workers()


def create_directory(namespace: str = NAMESPACE) -> Any:  # Ray types an actor's handle as Any
    """The cluster's directory actor, made if there is none. Blocks for one round trip."""
    actor = ray.remote(DirectoryActor).options(
        name=_NAME,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        num_cpus=0,
        # A worker that makes it anew has a placement group for its ranks, with which it must not end.
        scheduling_strategy="DEFAULT",
    )
    return actor.remote()


def has_directory(namespace: str = NAMESPACE) -> bool:
    """Whether there is one; makes none. Blocks for one round trip."""
    try:
        ray.get_actor(_NAME, namespace=namespace)
    except ValueError:
        return False
    return True


def remove_directory(namespace: str = NAMESPACE) -> None:
    """End the directory actor. Idempotent."""
    try:
        ray.kill(ray.get_actor(_NAME, namespace=namespace))
    except ValueError:
        return  # there is none


class RayDirectory:
    """The `Directory` through the named actor.

    Every call ends within `timeout_s`, with `WorkerUnavailable` when the actor did not answer. The
    next call then looks the actor up again, or makes a new one. Picklable; holds no connection.
    """

    def __init__(
        self,
        namespace: str = NAMESPACE,
        timeout_s: float = 2.0,
        find_actor: Callable[[str], Any] = create_directory,
    ) -> None:
        """`find_actor` gets the namespace and may block."""
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._find_actor = find_actor
        self._lookup: Background[Any] | None = None
        self._actor: Any = None

    def __reduce__(self) -> tuple[object, ...]:
        return RayDirectory, (self._namespace, self._timeout_s, self._find_actor)

    async def announce(self, record: WorkerRecord) -> None:
        await self._call(lambda actor: actor.announce.remote(record))

    async def withdraw(self, identity: WorkerIdentity) -> None:
        await self._call(lambda actor: actor.withdraw.remote(identity))

    async def workers(self) -> tuple[WorkerRecord, ...]:
        records: tuple[WorkerRecord, ...] = await self._call(lambda actor: actor.workers.remote())
        return records

    async def _call(self, call: Callable[[Any], Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._actor is None:
                    self._actor = await self._find()
                return await call(self._actor)
        except (RayError, TimeoutError) as error:
            self._actor = None
            raise WorkerUnavailable(f"the directory did not answer: {type(error).__name__}") from error

    async def _find(self) -> Any:
        """The actor. One look-up at a time: while Ray's GCS is away it hangs, and keeps its thread.

        That is none of the event loop's own threads: they are few, and others would wait for them.
        """
        if self._lookup is None:
            self._lookup = Background("directory lookup", partial(self._find_actor, self._namespace))
        lookup = self._lookup
        while lookup.is_running:  # noqa: ASYNC110  # a thread tells no event loop of its end
            await asyncio.sleep(LOOKUP_POLL_S)
        self._lookup = None
        return lookup.result()
