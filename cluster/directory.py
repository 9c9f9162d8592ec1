"""Who lives in the cluster: the directory's state, and the directory of a cluster in one process."""

from __future__ import annotations

import time
from dataclasses import dataclass

from protocol.ids import WorkerId, WorkerIdentity
from protocol.membership import WorkerRecord
from protocol.ports import Clock

ENTRY_LIFETIME_S = 3.5
"""Workers announce themselves each second; one that missed three announcements is gone."""


@dataclass(frozen=True, slots=True)
class _Entry:
    record: WorkerRecord
    announced_at: float


class DirectoryState:
    """The records of all living workers. Pure: time comes from `clock`, and one thread calls it."""

    def __init__(self, clock: Clock, lifetime_s: float = ENTRY_LIFETIME_S) -> None:
        self._clock = clock
        self._lifetime_s = lifetime_s
        self._entries: dict[WorkerId, _Entry] = {}

    def announce(self, record: WorkerRecord) -> None:
        """Add or refresh a worker. Another incarnation of the same worker id takes its place."""
        self._entries[record.identity.worker_id] = _Entry(record, self._clock())

    def withdraw(self, identity: WorkerIdentity) -> None:
        """Remove exactly this incarnation: a late farewell never removes its successor."""
        entry = self._entries.get(identity.worker_id)
        if entry is not None and entry.record.identity == identity:
            del self._entries[identity.worker_id]

    def workers(self) -> tuple[WorkerRecord, ...]:
        """All living workers, sorted by role and worker id."""
        self._forget_the_silent()
        records = (entry.record for entry in self._entries.values())
        return tuple(sorted(records, key=lambda r: (r.role.value, r.identity.worker_id)))

    def _forget_the_silent(self) -> None:
        oldest = self._clock() - self._lifetime_s
        self._entries = {w: e for w, e in self._entries.items() if e.announced_at >= oldest}


class InProcessDirectory:
    """The `Directory` of a cluster that lives in one process."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._state = DirectoryState(clock)

    async def announce(self, record: WorkerRecord) -> None:
        self._state.announce(record)

    async def withdraw(self, identity: WorkerIdentity) -> None:
        self._state.withdraw(identity)

    async def workers(self) -> tuple[WorkerRecord, ...]:
        return self._state.workers()
