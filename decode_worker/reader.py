"""On which thread do KV blocks move? On one of its own, the only one that ever touches the transport.

Why not on the event loop: to connect to a peer or to start a large read takes milliseconds, in which no
token would leave. Why polled there, too: the wait for many reads then costs the event loop one wake-up
per read that ends, and transports need no locks.

    event loop ── call ──> inbox ──> transport thread ── result ──> future on the event loop
                                      │ polls the pending reads, every 0.1 ms at first, then up to 5 ms
A call is answered after the poll that follows it: a read that its start has carried out wakes the event
loop once, not twice.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from protocol.errors import EngineFault, TransferFailed
from protocol.handoff import Fingerprint, TransportEndpoint
from protocol.ids import BlockId
from protocol.ports import FetchStatus, KvReader, TokenFetch
from rpc import Health

ResultT = TypeVar("ResultT")

MIN_POLL_S = 0.0001
MAX_POLL_S = 0.005
IDLE_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class ReadEnd:
    """How a read ended."""

    status: FetchStatus
    """DONE or FAILED."""
    checksums: Mapping[int, int] = field(default_factory=dict)
    """CRC-32 of the owner's blocks as they arrived, by index into its block table, where they are taken."""


@dataclass(frozen=True, slots=True)
class Read:
    """One read in flight, as the event loop sees it."""

    num_bytes: int
    ended: asyncio.Future[ReadEnd]
    """Until it resolves the transport may touch the blocks."""


class BlockReader(Protocol):
    """Reads KV of peers into this worker's pool. Used on the event loop."""

    async def connect(self, peer: TransportEndpoint, fingerprint: Fingerprint) -> None:
        """Raises `LayoutMismatch` or `TransferFailed`."""

    async def disconnect(self, agent: str) -> None:
        """No read from the agent may be pending."""

    async def read(
        self, agent: str, remote_table: Sequence[BlockId], local_table: Sequence[BlockId], tokens: range
    ) -> Read:
        """Start a read of these positions; the tables are the whole sequence's, with each side's block
        size. Raises `TransferFailed` when it cannot be started; then no block is touched."""


@dataclass(frozen=True, slots=True)
class _Pending:
    fetch: TokenFetch
    ended: Future[ReadEnd]


@dataclass(frozen=True, slots=True)
class _Call:
    work: Callable[[], Any]
    result: Future[Any]

    def run(self) -> Callable[[], None] | None:
        """Do the work for whoever waits for the result, its errors are theirs. Returns what tells them;
        None when nobody waits any more."""
        if not self.result.set_running_or_notify_cancel():
            return None
        try:
            return partial(self.result.set_result, self.work())
        except Exception as error:  # handed over whole to the waiting side
            return partial(self.result.set_exception, error)


class TransportThread:
    """The `BlockReader` over a `KvReader`, which it owns and closes."""

    def __init__(self, reader: KvReader, health: Health, name: str = "kv transport") -> None:
        self._reader = reader
        self._health = health
        self._inbox: SimpleQueue[_Call | None] = SimpleQueue()  # None only wakes the thread
        self._pending: list[_Pending] = []
        self._answers: list[Callable[[], None]] = []
        """To be told when the reads have been polled."""
        self._poll_s = MIN_POLL_S
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopping = False
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; results arrive on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, timeout_s: float) -> None:
        """Close the transport and end the thread. Idempotent; raises `EngineFault` when it hangs.

        Calls that come later are refused, also when the thread never ran.
        """
        if self._thread.ident is None and not self._has_ended:
            self._has_ended = True
            self._reader.close()
        if not self._thread.is_alive():
            return
        self._is_stopping = True
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)
        if self._thread.is_alive():
            raise EngineFault(f"the transport did not close within {timeout_s} s")

    async def connect(self, peer: TransportEndpoint, fingerprint: Fingerprint) -> None:
        await self._call(partial(self._reader.connect, peer, fingerprint))

    async def disconnect(self, agent: str) -> None:
        await self._call(partial(self._reader.disconnect, agent))

    async def read(
        self, agent: str, remote_table: Sequence[BlockId], local_table: Sequence[BlockId], tokens: range
    ) -> Read:
        num_bytes, ended = await self._call(partial(self._begin, agent, remote_table, local_table, tokens))
        return Read(num_bytes, asyncio.wrap_future(ended))

    async def _call(self, work: Callable[[], ResultT]) -> ResultT:
        """Run `work` on the thread. It cannot be cancelled once the thread has taken it."""
        result: Future[ResultT] = Future()
        self._inbox.put(_Call(work, result))
        if self._has_ended:  # read after the put: whoever empties the inbox last sees this call
            self._refuse_rest()
        return await asyncio.wrap_future(result)

    def _begin(
        self, agent: str, remote_table: Sequence[BlockId], local_table: Sequence[BlockId], tokens: range
    ) -> tuple[int, Future[ReadEnd]]:
        fetch = self._reader.fetch_tokens(agent, remote_table, local_table, tokens)
        ended: Future[ReadEnd] = Future()
        ended.set_running_or_notify_cancel()  # from here on nobody can cancel it
        self._pending.append(_Pending(fetch, ended))
        self._poll_s = MIN_POLL_S
        return fetch.num_bytes, ended

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._take_calls()
                self._poll_reads()
                self._answer()
            self._reader.close()
        except BaseException as error:  # nothing is above a thread: pending reads stay pending
            self._report(error)
        finally:
            self._has_ended = True
            self._answer()
            self._refuse_rest()

    def _take_calls(self) -> None:
        try:
            call = self._inbox.get(timeout=self._poll_s if self._pending else IDLE_WAIT_S)
            while True:
                answer = None if call is None else call.run()
                if answer is not None:
                    self._answers.append(answer)
                call = self._inbox.get_nowait()
        except Empty:
            self._poll_s = min(2 * self._poll_s, MAX_POLL_S)

    def _answer(self) -> None:
        answers, self._answers = self._answers, []
        for answer in answers:
            answer()

    def _refuse_rest(self) -> None:
        while True:
            try:
                call = self._inbox.get_nowait()
            except Empty:
                return
            if call is not None:
                call.result.set_exception(TransferFailed("the KV transport of this worker has ended"))

    def _poll_reads(self) -> None:
        still_pending = []
        for read in self._pending:
            status = read.fetch.poll()
            if status is FetchStatus.PENDING:
                still_pending.append(read)
                continue
            checksums = read.fetch.checksums() if status is FetchStatus.DONE else {}
            read.fetch.release()
            read.ended.set_result(ReadEnd(status, checksums))
        self._pending = still_pending

    def _report(self, error: BaseException) -> None:
        fault = EngineFault(f"the KV transport broke: {type(error).__name__}: {error}")
        fault.__cause__ = error
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._health.report, fault)
