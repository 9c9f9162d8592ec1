"""How are KV reads made to fail on purpose? By a wrapper around any transport, which a `FaultPlan` drives.

It keeps the transport's contract, and so every fault is one that a real transport could show: a read is
FAILED only when nothing can write into its blocks any more, and one that is held back writes late, into
blocks that whoever gave up on it must not have used for anything else.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from kv_transfer.faults import FaultKind
from kv_transfer.memory import MemoryKind, PoolMemory
from kv_transfer.spans import Spans, merged, place_of_byte, span_bytes, whole_block
from protocol.errors import StartupError, TransferFailed
from protocol.faults import Fault, FaultPlan
from protocol.handoff import Span, TransportEndpoint
from protocol.ids import BlockId
from protocol.ports import Clock, FetchHandle, FetchStatus, KvTransport

HALVING = frozenset({FaultKind.FAIL, FaultKind.TRUNCATE, FaultKind.DISCONNECT})
"""Faults of which only the first half of the blocks gets through."""


class FaultyTransport:
    """The `KvTransport` that is another one with faults. Owns it, and is on its thread."""

    def __init__(
        self,
        transport: KvTransport,
        memory: PoolMemory,
        plan: FaultPlan[FaultKind],
        clock: Clock = time.monotonic,
    ) -> None:
        """`memory` is the pool that `transport` reads into. Raises `StartupError` for device memory."""
        if memory.kind is not MemoryKind.HOST:
            raise StartupError("faults spoil KV in host memory only: leave faults out of the configuration")
        self._transport = transport
        self._memory = memory
        self._plan = plan
        self._clock = clock
        self._num_pending: Counter[str] = Counter()
        self._broken_agents: set[str] = set()
        self._spans: dict[str, Spans] = {}

    @property
    def endpoint(self) -> TransportEndpoint:
        return self._transport.endpoint

    def connect(self, peer: TransportEndpoint, spans: Sequence[Span] | None = None) -> None:
        self._transport.connect(peer, spans)
        whole = whole_block(self._memory.block_bytes)
        self._spans[peer.agent] = whole if spans is None else merged(spans)

    def disconnect(self, agent: str) -> None:
        self._check_idle(agent)
        self._transport.disconnect(agent)
        self._broken_agents.discard(agent)
        self._spans.pop(agent, None)

    def fetch(
        self, agent: str, remote_blocks: Sequence[BlockId], local_blocks: Sequence[BlockId]
    ) -> FetchHandle:
        if agent in self._broken_agents:
            raise TransferFailed(f"fault injection: {agent} is disconnected")
        fault = self._plan.take()
        if fault is None:
            return self._transport.fetch(agent, remote_blocks, local_blocks)
        if fault.kind is FaultKind.REFUSE:
            raise TransferFailed(f"fault injection: a read from {agent} cannot be started")
        return self._spoiled(fault, agent, remote_blocks, local_blocks)

    def close(self) -> None:
        for agent in self._num_pending:
            self._check_idle(agent)
        self._transport.close()

    def _spoiled(
        self, fault: Fault[FaultKind], agent: str, remote: Sequence[BlockId], local: Sequence[BlockId]
    ) -> FaultyFetch:
        through = len(local) // 2 if fault.kind in HALVING else len(local)

        def start() -> FetchHandle:
            return self._transport.fetch(agent, remote[:through], local[:through])

        def end() -> None:
            self._num_pending[agent] -= 1
            if fault.kind is FaultKind.DISCONNECT:
                self._broken_agents.add(agent)
            if fault.kind is FaultKind.BIT_FLIP and local:
                self._flip_a_bit(agent, local)

        fetch = FaultyFetch(
            len(local) * span_bytes(self._spans.get(agent, ())),
            start,
            end,
            is_held=self._is_held(fault),
            is_failed=fault.kind in {FaultKind.FAIL, FaultKind.DISCONNECT},
        )
        self._num_pending[agent] += 1
        return fetch

    def _is_held(self, fault: Fault[FaultKind]) -> Callable[[], bool]:
        """Tells whether a read with this fault still waits for its start."""
        if fault.kind is FaultKind.STALL:
            return lambda: not self._plan.is_resumed(fault)
        if fault.kind is FaultKind.DELAY:
            until_s = self._clock() + fault.delay_s
            return lambda: self._clock() < until_s
        return lambda: False

    def _flip_a_bit(self, agent: str, blocks: Sequence[BlockId]) -> None:
        """One of those that were read."""
        view = self._memory.block_view(blocks[self._plan.pick(len(blocks))])
        bit = self._plan.pick(8 * span_bytes(self._spans[agent]))
        view[place_of_byte(bit // 8, self._spans[agent])] ^= 1 << bit % 8

    def _check_idle(self, agent: str) -> None:
        if self._num_pending[agent]:
            raise TransferFailed(f"{self._num_pending[agent]} reads from {agent} are still pending")


class FaultyFetch:
    """The `FetchHandle` of a read with a fault: `start`ed once it is not held, `end`ed when it is over."""

    def __init__(
        self,
        num_bytes: int,
        start: Callable[[], FetchHandle],
        end: Callable[[], None],
        *,
        is_held: Callable[[], bool],
        is_failed: bool,
    ) -> None:
        """Raises `TransferFailed` when a read that is not held cannot be started."""
        self._num_bytes = num_bytes
        self._start = start
        self._end = end
        self._is_held = is_held
        self._is_failed = is_failed
        self._inner: FetchHandle | None = None if is_held() else start()
        self._status = FetchStatus.PENDING

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def poll(self) -> FetchStatus:
        if self._status is FetchStatus.PENDING:
            self._status = self._advance()
            if self._status is not FetchStatus.PENDING:
                self._end()
        return self._status

    def release(self) -> None:
        if self._status is FetchStatus.PENDING:
            raise TransferFailed("a read is still pending")

    def _advance(self) -> FetchStatus:
        if self._inner is None:
            if self._is_held():
                return FetchStatus.PENDING
            try:
                self._inner = self._start()
            except TransferFailed:  # too late to raise it
                return FetchStatus.FAILED
        status = self._inner.poll()
        if status is FetchStatus.PENDING:
            return status
        self._inner.release()
        return FetchStatus.FAILED if self._is_failed else status
