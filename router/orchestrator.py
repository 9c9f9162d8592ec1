"""The life of an admitted request: prefill, hand-off, decode, and what happens when a worker fails.

    leg -> leg -> ... -> finished
    leg: wait until both roles can work -> P prefills -> ticket offered to D, first token to the client
         -> D's deltas to the client

A leg that fails in a retryable way is followed by another one: prompt and all tokens that the client
has are prefilled again, and generation goes on from there. Noise is a function of (seed, position), so
that the client gets the tokens of an undisturbed run: it sees a pause, never a repeated or a missing
token. A ticket is never offered twice: its first reader may have used it up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from protocol.errors import DeadlineExceeded, Overloaded, SplitserveError, WorkerUnavailable
from protocol.generation import GenerationRequest, TokenDelta
from protocol.ids import RequestId, Role, WorkerIdentity
from protocol.ports import Clock
from router.policy import RoutingPolicy
from router.ports import DecodeWorker, Prefilled, PrefillWorker, TokenStream, Worker, Workers, num_usable
from router.settings import RouterSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")
W = TypeVar("W", bound=Worker)


@dataclass(slots=True)
class _Run:
    """What is known about one request across its legs."""

    request: GenerationRequest
    deadline: float
    """By the orchestrator's clock."""
    emitted: list[int] = field(default_factory=list)
    """Token ids that the client has."""
    num_failures: int = 0
    failed: set[WorkerIdentity] = field(default_factory=set)
    """Workers that let this request down; others are preferred."""
    current: WorkerIdentity | None = None
    """The worker that the running leg waits for now."""

    def leg(self, now: float) -> GenerationRequest:
        """The request as the next leg's workers get it.

        Every further leg has an id of its own, so that no worker takes it for one it still knows.
        """
        suffix = f".{self.num_failures}" if self.num_failures else ""
        return replace(
            self.request,
            request_id=RequestId(self.request.request_id + suffix),
            output_token_ids=self.request.output_token_ids + tuple(self.emitted),
            deadline_s=max(self.deadline - now, 0.0),
        )


class Orchestrator:
    """Runs requests over the workers. The only place that decides about retries."""

    def __init__(
        self,
        workers: Workers,
        policy: RoutingPolicy,
        settings: RouterSettings,
        clock: Clock,
        on_retry: Callable[[SplitserveError], None],
    ) -> None:
        self._workers = workers
        self._policy = policy
        self._settings = settings
        self._clock = clock
        self._on_retry = on_retry
        self._num_running = 0
        self._last_handoff: float | None = None

    @property
    def last_handoff(self) -> float | None:
        """When a decode worker last proved by a token that it took KV over; by the clock given.

        A prompt that was recomputed there, or was cached there, proves nothing.
        """
        return self._last_handoff

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        """The request's tokens, as they come; the last delta has a `finish_reason`.

        Closing the generator aborts the request wherever it is. Raises `SplitserveError` only.
        """
        run = _Run(request, self._clock() + request.deadline_s)
        self._num_running += 1
        try:
            async with aclosing(self._legs(run)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._num_running -= 1

    async def _legs(self, run: _Run) -> AsyncGenerator[TokenDelta, None]:
        while True:
            await self._until_usable(Role.DECODE, run)  # no prefill whose KV nobody could take over
            await self._until_usable(Role.PREFILL, run)
            try:
                async with aclosing(self._leg(run)) as deltas:
                    async for delta in deltas:
                        run.emitted.extend(token.token_id for token in delta.tokens)
                        yield delta
            except SplitserveError as error:
                await self._prepare_retry(run, error)
            else:
                return

    async def _leg(self, run: _Run) -> AsyncGenerator[TokenDelta, None]:
        leg = run.leg(self._clock())
        owner, done = await self._prefill(leg, run)
        if done.ticket is None:
            yield done.first
            return
        with self._handed_off(owner, leg, done, run) as stream:
            yield done.first
            if stream is None:
                raise WorkerUnavailable("no decode worker is left to take the request over")
            finished = False
            while not finished:
                delta = await self._within_deadline(run, stream.next())
                if delta.receipt.fetched_bytes:
                    self._last_handoff = self._clock()
                finished = delta.finish_reason is not None
                yield delta

    async def _prefill(self, leg: GenerationRequest, run: _Run) -> tuple[PrefillWorker, Prefilled]:
        owner = self._choose(Role.PREFILL, self._workers.prefill_workers(), run)
        run.current = owner.identity
        with _assigned(owner, leg):
            return owner, await self._within_deadline(run, owner.client.prefill(leg))

    @contextmanager
    def _handed_off(
        self, owner: PrefillWorker, leg: GenerationRequest, done: Prefilled, run: _Run
    ) -> Iterator[TokenStream | None]:
        """The leg's stream at a decode worker, or None when there is no such worker at this moment.

        The end of the body aborts what has not finished. A ticket that nobody took, or whose reader
        failed, is released; that of a running reader is the reader's.
        """
        assert done.ticket is not None  # noqa: S101
        reader = self._choose_reader(owner, run)
        run.current = reader.identity if reader else None
        try:
            if reader is None:
                yield None
                return
            with _assigned(reader, leg):
                stream = reader.client.decode(leg, done.ticket, done.first.tokens[0])
                try:
                    yield stream
                finally:
                    stream.close()
        except SplitserveError:
            owner.client.release(done.ticket.ticket_id)
            raise
        except BaseException:
            if reader is None:
                owner.client.release(done.ticket.ticket_id)
            raise

    def _choose_reader(self, owner: PrefillWorker, run: _Run) -> DecodeWorker | None:
        """A decode worker, of the owner's own kind if there is one: versions mix in a rolling update."""
        workers = self._workers.decode_workers()
        same = [w for w in workers if not w.fingerprint.differences(owner.fingerprint)]
        return self._choose(Role.DECODE, same or workers, run) if workers else None

    def _choose(self, role: Role, workers: Sequence[W], run: _Run) -> W:
        fresh = [worker for worker in workers if worker.identity not in run.failed]
        return self._policy.choose(role, fresh or workers)

    async def _prepare_retry(self, run: _Run, error: SplitserveError) -> None:
        """Return when the request may have another leg; else raise `error`."""
        if not error.retryable or run.num_failures >= self._settings.num_retries:
            raise error
        if run.current is not None:
            run.failed.add(run.current)
        if isinstance(error, Overloaded) and not run.emitted and not self._has_alternative(run):
            raise error
        pause_s = max(self._settings.retry_backoff_s * 2**run.num_failures, error.retry_after_s or 0.0)
        if self._clock() + pause_s >= run.deadline:
            raise error
        run.num_failures += 1
        self._on_retry(error)
        logger.warning(
            "request %s goes on elsewhere after %d tokens: %s at %s",
            run.request.request_id,
            len(run.emitted),
            type(error).__name__,
            run.current,
        )
        await asyncio.sleep(pause_s)

    def _has_alternative(self, run: _Run) -> bool:
        """Whether the role of the worker that failed last has one that did not fail this request."""
        for workers in _both(self._workers):
            identities = {worker.identity for worker in workers}
            if run.current in identities:
                return bool(identities - run.failed)
        return True  # it is gone: whoever comes next is another one

    async def _until_usable(self, role: Role, run: _Run) -> None:
        """Return when a worker of `role` can take requests.

        Raises `WorkerUnavailable` when none appears in time, and `DeadlineExceeded`.
        """
        give_up = min(self._clock() + self._settings.worker_wait_s, run.deadline)
        while not num_usable(self._workers, role):
            try:
                async with asyncio.timeout(max(give_up - self._clock(), 0.0)):
                    await self._workers.changed()
            except TimeoutError as error:
                if give_up >= run.deadline:
                    raise _deadline_exceeded() from error
                raise WorkerUnavailable(
                    f"no {role.value} worker can take requests now",
                    retry_after_s=self._settings.retry_after_s,
                ) from error

    async def _within_deadline(self, run: _Run, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(max(run.deadline - self._clock(), 0.0)):
                return await work
        except TimeoutError as error:
            raise _deadline_exceeded() from error

    def assert_idle(self) -> None:
        """Nothing runs, and nothing is counted as outstanding at a worker."""
        assert not self._num_running, f"{self._num_running} requests still run"  # noqa: S101
        for worker in (w for workers in _both(self._workers) for w in workers):
            outstanding = (worker.num_outstanding, worker.outstanding_tokens)
            assert outstanding == (0, 0), f"{worker.identity} still has {outstanding}"  # noqa: S101


def _both(workers: Workers) -> tuple[Sequence[Worker], Sequence[Worker]]:
    return workers.prefill_workers(), workers.decode_workers()


def _deadline_exceeded() -> DeadlineExceeded:
    return DeadlineExceeded("the request's time was up before the answer was complete")


@contextmanager
def _assigned(worker: Worker, leg: GenerationRequest) -> Iterator[None]:
    """Count the leg's tokens as outstanding at the worker during the body."""
    num_tokens = len(leg.prompt_token_ids) + len(leg.output_token_ids)
    worker.assign(num_tokens)
    try:
        yield
    finally:
        worker.unassign(num_tokens)
