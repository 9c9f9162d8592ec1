"""Who owns blocks that are being read into? The read, until it has ended, whoever wanted it.

started ──> ended (DONE or FAILED): the blocks are the request's again, or nobody's if it is gone
   └── not ended in `fetch_limit_s`: they are never touched again, and the worker is unfit
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from decode_worker.peers import Peer
from decode_worker.tools import IntakeTools
from protocol.errors import EngineFault, TransferFailed
from protocol.ids import BlockId
from protocol.ports import FetchStatus


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """What came of a read."""

    num_bytes: int = 0
    checksums: Mapping[int, int] = field(default_factory=dict)
    """As in `ReadEnd`."""
    trouble: str = ""
    """Empty when the blocks hold what was to be read."""


class PendingRead:
    """One read, on a task of its own that outlives the request if it must. Used on one event loop."""

    def __init__(
        self,
        peer: Peer,
        tools: IntakeTools,
        *,
        agent: str,
        remote_table: Sequence[BlockId],
        local_table: Sequence[BlockId],
        tokens: range,
    ) -> None:
        """Starts at once. `agent` is the connected peer's; `tokens` are what is read, by position."""
        self.outcome: asyncio.Future[ReadOutcome] = asyncio.get_running_loop().create_future()
        """Resolves when the transport touches the blocks no more."""
        self._peer = peer
        self._agent = agent
        self._remote_table = remote_table
        self._local_table = local_table
        self._tokens = tokens
        self._tools = tools
        self._then: Callable[[], None] | None = None
        peer.num_reading += 1
        tools.tasks.spawn(self._run(), f"read from {peer.identity}")

    def abandon(self, then: Callable[[], None]) -> None:
        """Nobody waits for it any more. `then` is called when it has ended, and so at once if it has."""
        if self.outcome.done():
            then()
        else:
            self._then = then

    async def _run(self) -> None:
        limit_s = self._tools.config.fetch_limit_s
        try:
            async with asyncio.timeout(limit_s):
                outcome = await self._read()
        except TimeoutError:
            trouble = f"a read from {self._peer.identity} has not ended in {limit_s:g} s"
            self._tools.health.report(EngineFault(f"{trouble}; its blocks are lost to this worker"))
            return
        self._peer.num_reading -= 1
        if outcome.trouble:
            self._peer.mark_stale()
        self.outcome.set_result(outcome)
        if self._then is not None:
            self._then()

    async def _read(self) -> ReadOutcome:
        started_s = self._tools.clock()
        try:
            read = await self._tools.reader.read(
                self._agent, self._remote_table, self._local_table, self._tokens
            )
        except TransferFailed as error:
            return ReadOutcome(trouble=error.message)
        await asyncio.wait([read.ended])  # a wait that is given up must not cancel the read's future
        end = read.ended.result()
        if end.status is not FetchStatus.DONE:
            return ReadOutcome(trouble=f"the read from {self._peer.identity} failed")
        self._peer.read_rate.observe(len(self._tokens), self._tools.clock() - started_s)
        return ReadOutcome(read.num_bytes, end.checksums)
