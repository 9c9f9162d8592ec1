"""The life of an admitted request: prefill, hand-off, decode, and what happens when a worker fails.

    leg -> leg -> ... -> finished
    leg: wait until both roles can work -> P prefills -> ticket offered to D, first tokens to the client
         -> D's deltas to the client

A leg that fails in a retryable way is followed by another one: prompt and all tokens that the client
has are prefilled again, and generation goes on from there. Noise is a function of (seed, position), so
that the client gets the tokens of an undisturbed run: it sees a pause, never a repeated or a missing
token. A ticket is never offered twice: its first reader may have used it up.

All choices of a request share a leg until it fails; from then on each of those that have not ended goes
on by itself, as the request of one choice that it always was (see `choice_seed`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TypeVar

from protocol.errors import (
    DeadlineExceeded,
    EngineFault,
    Overloaded,
    SplitserveError,
    WorkerUnavailable,
)
from protocol.generation import GenerationRequest, TokenDelta
from protocol.ids import Role
from protocol.ports import Clock
from router.policy import RoutingPolicy
from router.ports import DecodeWorker, Prefilled, PrefillWorker, TokenStream, Worker, Workers, num_usable
from router.run import Generation, Run
from router.settings import RouterSettings

logger = logging.getLogger(__name__)

MAX_FAULTS = 1
"""Engines that may break over a request before it is taken for the cause: it gets no further ones."""

T = TypeVar("T")
W = TypeVar("W", bound=Worker)


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

    def generate(self, request: GenerationRequest) -> Generation:
        """Run a request, from the first look at its deltas on. Close what comes back in every case."""
        choices = range(request.index, request.index + request.n)
        run = Run(request, self._clock() + request.deadline_s, {index: [] for index in choices})
        return Generation(run, self._counted(run))

    async def _counted(self, run: Run) -> AsyncGenerator[TokenDelta, None]:
        self._num_running += 1
        try:
            async with aclosing(self._legs(run)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._num_running -= 1

    async def _legs(self, run: Run) -> AsyncGenerator[TokenDelta, None]:
        """Until all choices have ended."""
        while run.emitted:
            is_parted = run.has_emitted and run.request.n > 1
            if not is_parted:
                await self._until_usable(Role.DECODE, run)  # no prefill whose KV nobody could take over
                await self._until_usable(Role.PREFILL, run)
            try:
                async with aclosing(self._apart(run) if is_parted else self._leg(run)) as deltas:
                    async for delta in deltas:
                        if delta.index in run.emitted:
                            run.note(delta)
                            yield delta
            except SplitserveError as error:
                if not run.emitted:
                    return  # nobody waits for more
                if is_parted:
                    raise
                await self._prepare_retry(run, error)
            finally:
                run.abort_choice = None

    async def _leg(self, run: Run) -> AsyncGenerator[TokenDelta, None]:
        leg = run.leg(self._clock())
        owner, done = await self._prefill(leg, run)
        if leg.sampling.prompt_logprobs is not None:
            run.prompt_logprobs = done.prompt_logprobs
        if done.ticket is None:
            for first in done.firsts:
                yield first
            return
        with self._handed_off(owner, leg, done, run) as stream:
            run.abort_choice = stream.drop if stream else None
            for first in done.firsts:
                yield first
            if stream is None:
                raise WorkerUnavailable("no decode worker is left to take the request over")
            while run.emitted:
                delta = await self._within_deadline(run, stream.next())
                if delta.receipt.fetched_bytes:
                    self._last_handoff = self._clock()
                yield delta

    async def _apart(self, run: Run) -> AsyncGenerator[TokenDelta, None]:
        """The choices that have not ended, each on legs of its own; the first failure is that of all."""
        arrivals: asyncio.Queue[tuple[int, TokenDelta | Exception]] = asyncio.Queue()
        tasks = {
            index: asyncio.create_task(self._forward(run.alone(index), arrivals), name=f"choice {index}")
            for index in run.emitted
        }
        run.abort_choice = lambda index: _cancel(tasks[index])
        try:
            while run.emitted:
                index, arrival = await arrivals.get()
                if not isinstance(arrival, Exception):
                    yield arrival
                elif index in run.emitted:
                    raise arrival
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _forward(self, run: Run, arrivals: asyncio.Queue[tuple[int, TokenDelta | Exception]]) -> None:
        """Put a single choice's deltas, or what ended it, into `arrivals`."""
        index = run.request.index
        try:
            async with aclosing(self._legs(run)) as deltas:
                async for delta in deltas:
                    arrivals.put_nowait((index, delta))
        except Exception as error:  # raised by the one who waits for the arrivals
            arrivals.put_nowait((index, error))

    async def _prefill(self, leg: GenerationRequest, run: Run) -> tuple[PrefillWorker, Prefilled]:
        owner = self._choose(Role.PREFILL, self._workers.prefill_workers(), run)
        run.current = owner.identity
        with _assigned(owner, leg):
            return owner, await self._within_deadline(run, owner.client.prefill(leg))

    @contextmanager
    def _handed_off(
        self, owner: PrefillWorker, leg: GenerationRequest, done: Prefilled, run: Run
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
                stream = reader.client.decode(leg, done.ticket, done.open_choices)
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

    def _choose_reader(self, owner: PrefillWorker, run: Run) -> DecodeWorker | None:
        """A decode worker, of the owner's own kind if there is one: versions mix in a rolling update."""
        workers = self._workers.decode_workers()
        same = [w for w in workers if not w.fingerprint.differences(owner.fingerprint)]
        return self._choose(Role.DECODE, same or workers, run) if workers else None

    def _choose(self, role: Role, workers: Sequence[W], run: Run) -> W:
        fresh = [worker for worker in workers if worker.identity not in run.failed]
        return self._policy.choose(role, fresh or workers)

    async def _prepare_retry(self, run: Run, error: SplitserveError) -> None:
        """Return when the request may have another leg; else raise `error`."""
        if isinstance(error, EngineFault):
            error = _told_to_client(run, error)
            run.num_faults += 1
        may_retry = error.retryable and run.num_failures < self._settings.num_retries
        if not may_retry or run.num_faults > MAX_FAULTS:
            raise error
        if run.current is not None:
            run.failed.add(run.current)
        if isinstance(error, Overloaded) and not run.has_emitted and not self._has_alternative(run):
            raise error
        pause_s = max(self._settings.retry_backoff_s * 2**run.num_failures, error.retry_after_s or 0.0)
        if self._clock() + pause_s >= run.deadline:
            raise error
        run.num_failures += 1
        self._on_retry(error)
        logger.warning(
            "request %s goes on elsewhere after %d tokens: %s at %s",
            run.request.request_id,
            sum(map(len, run.emitted.values())),
            type(error).__name__,
            run.current,
        )
        await asyncio.sleep(pause_s)

    def _has_alternative(self, run: Run) -> bool:
        """Whether the role of the worker that failed last has one that did not fail this request."""
        for workers in _both(self._workers):
            identities = {worker.identity for worker in workers}
            if run.current in identities:
                return bool(identities - run.failed)
        return True  # it is gone: whoever comes next is another one

    async def _until_usable(self, role: Role, run: Run) -> None:
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

    async def _within_deadline(self, run: Run, work: Awaitable[T]) -> T:
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


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _told_to_client(run: Run, fault: EngineFault) -> EngineFault:
    """A fault speaks of the engine's insides and of whatever else ran there: that is for the log."""
    request_id = run.request.request_id
    logger.error("request %s met an engine fault at %s: %s", request_id, run.current, fault.message)
    told = EngineFault("the engine broke while it worked on this request", code="engine_fault")
    told.__cause__ = fault
    return told


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
