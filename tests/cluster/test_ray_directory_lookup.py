"""The directory's client while Ray does not answer. No Ray runs here."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cluster.ray_directory import RayDirectory
from protocol.errors import WorkerUnavailable


class FakeActor:
    """Has one method, and is its own handle for it."""

    @property
    def workers(self) -> FakeActor:
        return self

    async def remote(self) -> tuple[Any, ...]:
        return ("a worker",)


async def test_lookup_that_hangs_is_given_up_but_never_doubled() -> None:
    """While the GCS is away each look-up keeps a thread; one per call would use them all up."""
    is_back = threading.Event()
    namespaces: list[str] = []

    def find(namespace: str) -> FakeActor:
        namespaces.append(namespace)
        is_back.wait(10)
        return FakeActor()

    directory = RayDirectory("here", timeout_s=0.05, find_actor=find)
    for _ in range(3):
        with pytest.raises(WorkerUnavailable, match="TimeoutError"):
            await directory.workers()
    is_back.set()
    patient = RayDirectory("here", timeout_s=10, find_actor=find)
    assert await patient.workers() == ("a worker",)
    assert namespaces == ["here", "here"]
