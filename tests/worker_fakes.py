"""Fakes around a worker: an engine that does what the test says, a directory, ids and requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence

from engine import Command, EngineStats, Event
from kv_transfer import PoolMemory
from protocol.errors import SplitserveError
from protocol.generation import GenerationRequest, SamplingParams
from protocol.handoff import Fingerprint
from protocol.ids import BlockId, RequestId, WorkerId, WorkerIdentity
from protocol.membership import WorkerRecord

BLOCK_SIZE = 4
CLUSTER_TOKEN = "a cluster token"  # noqa: S105
FINGERPRINT = Fingerprint("m", "r1", "float32", "float32", 2, 2, 8, BLOCK_SIZE)
P0 = WorkerIdentity(WorkerId("p0"), "p-first")
D0 = WorkerIdentity(WorkerId("d0"), "d-first")


class ScriptedEngine:
    """Records commands; events come when the test emits them."""

    def __init__(self, on_events: Callable[[Sequence[Event]], None]) -> None:
        self._on_events = on_events
        self.commands: list[Command] = []
        self.alive = True
        self.fault: SplitserveError | None = None
        self.stats = EngineStats(blocks_total=100, blocks_free=100)
        self.progress = 0
        self.refuses_with: SplitserveError | None = None

    def start(self) -> None:
        self.alive = True

    def post(self, command: Command) -> None:
        if self.refuses_with is not None:
            raise self.refuses_with
        self.commands.append(command)

    def stop(self, timeout_s: float) -> None:
        self.alive = False

    def emit(self, *events: Event) -> None:
        """One step's events."""
        self._on_events(events)

    def take(self) -> list[Command]:
        """The commands since the last call."""
        commands, self.commands = self.commands, []
        return commands


class MemoryDirectory:
    """A directory in the test's memory, which can be made to fail."""

    def __init__(self) -> None:
        self.records: dict[WorkerIdentity, WorkerRecord] = {}
        self.fails_with: SplitserveError | None = None
        self.num_announcements = 0

    async def announce(self, record: WorkerRecord) -> None:
        if self.fails_with is not None:
            raise self.fails_with
        self.num_announcements += 1
        self.records[record.identity] = record

    async def withdraw(self, identity: WorkerIdentity) -> None:
        if self.fails_with is not None:
            raise self.fails_with
        self.records.pop(identity, None)

    async def workers(self) -> tuple[WorkerRecord, ...]:
        if self.fails_with is not None:
            raise self.fails_with
        return tuple(self.records.values())


def make_request(
    name: str = "r", num_prompt: int = 10, outputs: tuple[int, ...] = (), deadline_s: float = 600.0
) -> GenerationRequest:
    return GenerationRequest(
        RequestId(name), tuple(range(1, num_prompt + 1)), SamplingParams(max_tokens=8), outputs, deadline_s
    )


class PoolKv(MutableMapping[tuple[BlockId, int], int]):
    """The fake executor's KV in a pool that a transport can read: eight bytes per token."""

    def __init__(self, memory: PoolMemory) -> None:
        self._memory = memory

    @classmethod
    def allocate(cls, num_blocks: int) -> tuple[PoolKv, PoolMemory]:
        memory = PoolMemory.allocate(num_blocks, BLOCK_SIZE * 8)
        return cls(memory), memory

    def __getitem__(self, slot: tuple[BlockId, int]) -> int:
        block_id, offset = slot
        return self._memory.block_view(block_id).cast("q")[offset]

    def __setitem__(self, slot: tuple[BlockId, int], digest: int) -> None:
        block_id, offset = slot
        self._memory.block_view(block_id).cast("q")[offset] = digest

    def __delitem__(self, slot: tuple[BlockId, int]) -> None:
        self[slot] = 0

    def __iter__(self) -> Iterator[tuple[BlockId, int]]:
        return ((BlockId(b), o) for b in range(self._memory.num_blocks) for o in range(BLOCK_SIZE))

    def __len__(self) -> int:
        return self._memory.num_blocks * BLOCK_SIZE
