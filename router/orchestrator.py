"""The life of an admitted request: one leg after another, and what happens when a worker fails.

    place ──> leg ──> ended
      └── failed in a retryable way, budget and time are left <──┘

A leg that fails is followed by another one: prompt and all tokens that the client has are computed again,
mostly from caches, and generation goes on from there. Noise is a function of (seed, position), so that
the client gets the tokens of an undisturbed run: it sees a pause, never a repeated or a missing token.
(A reader that is lost before its first token costs no leg: see `hand_over`.)

All choices of a request share a leg until it fails; from then on each of those that have not ended goes
on by itself, as the request of one choice that it always was (see `choice_seed`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from protocol.errors import EngineFault, Overloaded, SplitserveError
from protocol.generation import GenerationRequest, TokenDelta
from protocol.ports import Clock
from router.deadline import Deadline
from router.leg import LegRunner
from router.placement import Placement
from router.policy import RoutingPolicy
from router.ports import LegObserver, Worker, Workers
from router.run import Generation, Run
from router.settings import RouterSettings

logger = logging.getLogger(__name__)

MAX_FAULTS = 1
"""Engines that may break over a request before it is taken for the cause: it gets no further ones."""


class Orchestrator:
    """Runs requests over the workers. The only place that decides about retries."""

    def __init__(
        self,
        workers: Workers,
        policy: RoutingPolicy,
        settings: RouterSettings,
        clock: Clock,
        observer: LegObserver,
    ) -> None:
        self._workers = workers
        self._settings = settings
        self._clock = clock
        self._observer = observer
        self._placement = Placement(workers, policy, settings, clock, observer)
        self._leg_runner = LegRunner(self._placement, clock, observer)
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
        return self._generation(self._new_run(request))

    def prove(self, request: GenerationRequest) -> Generation:
        """As `generate`, but by a hand-off or not at all."""
        run = self._new_run(request)
        run.needs_handoff = True
        return self._generation(run)

    def _new_run(self, request: GenerationRequest) -> Run:
        choices = range(request.index, request.index + request.n)
        deadline = Deadline(self._clock() + request.deadline_s, self._clock)
        return Run(request, deadline, self._settings.num_retries, {index: [] for index in choices})

    def _generation(self, run: Run) -> Generation:
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
            deltas = (
                self._apart(run)
                if is_parted
                else self._leg_runner.run(run, await self._placement.find(run))
            )
            try:
                async with aclosing(deltas):
                    async for delta in deltas:
                        if delta.index in run.emitted:
                            self._note(run, delta)
                            yield delta
            except SplitserveError as error:
                if not run.emitted:
                    return  # nobody waits for more
                if is_parted:
                    raise
                await self._prepare_retry(run, error)
            finally:
                run.abort_choice = None

    def _note(self, run: Run, delta: TokenDelta) -> None:
        run.note(delta)
        if delta.receipt.fetched_bytes:
            self._last_handoff = self._clock()

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

    async def _prepare_retry(self, run: Run, error: SplitserveError) -> None:
        """Return when the request may have another leg; else raise `error`."""
        if isinstance(error, EngineFault):
            error = _told_to_client(run, error)
            run.num_faults += 1
        if not error.retryable or not run.may_fail_again or run.num_faults > MAX_FAULTS:
            raise error
        run.blame(error)
        if isinstance(error, Overloaded) and not run.has_emitted and not self._has_alternative(run):
            raise error
        pause_s = max(self._settings.retry_backoff_s * 2**run.num_vain_failures, error.retry_after_s or 0.0)
        if pause_s >= run.deadline.remaining_s:
            raise error
        run.count_failure()
        self._observer.retried(error)
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
