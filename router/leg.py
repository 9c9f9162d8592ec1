"""One leg of a request: a prompt is computed once, and tokens come until all has ended or a worker fails.

paired: P computes ──ticket──> offered to D at once, which reads while P computes the rest
            └──first tokens──> begin at D, and to the client;  D's deltas ──> client
alone:  P computes, and its first tokens are the last ones
local:  D computes the prompt itself; its deltas ──> client
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, closing, contextmanager

from protocol.errors import EngineFault
from protocol.generation import GenerationRequest, TokenDelta
from protocol.ports import Clock
from router.hand_over import HandOver
from router.placement import Placement
from router.ports import LegObserver, Prefilled, PrefillRun, PrefillWorker
from router.run import Run
from router.seat import Alone, Local, Paired, Place


class LegRunner:
    """Runs legs at the places that were found for them. Holds nothing between them."""

    def __init__(self, placement: Placement, clock: Clock, observer: LegObserver) -> None:
        self._placement = placement
        self._clock = clock
        self._observer = observer

    def run(self, run: Run, place: Place) -> AsyncGenerator[TokenDelta, None]:
        """The leg's deltas, to be iterated over at once; gives back all that it holds, on every way out.

        Iterating raises what a worker raised; `run.current` is that worker then.
        """
        if run.has_emitted:
            self._observer.resumed()
        match place:
            case Paired():
                return self._paired(run, place)
            case Alone():
                return self._alone(run, place)
            case Local():
                return self._local(run, place)

    async def _paired(self, run: Run, place: Paired) -> AsyncGenerator[TokenDelta, None]:
        leg = run.leg()
        with place.seat, _prefilling(run, place.owner, leg) as prefill:
            with _assigned(place.owner, leg):
                ticket = await run.deadline.bound(prefill.ticket())
            async with HandOver(run, leg, ticket, place, self._placement) as hand_over:
                with _assigned(place.owner, leg):
                    done = await run.deadline.bound(hand_over.prefilled(prefill))
                async with aclosing(self._handed_over(run, prefill, done, hand_over)) as deltas:
                    async for delta in deltas:
                        yield delta

    async def _handed_over(
        self, run: Run, prefill: PrefillRun, done: Prefilled, hand_over: HandOver
    ) -> AsyncGenerator[TokenDelta, None]:
        """From the first tokens on. The reader hears of them before a slow client has taken them."""
        since = self._clock()
        _note_scores(run, done)
        run.settle_on(*hand_over.ends)
        if done.open_choices:
            run.abort_choice = hand_over.drop
            hand_over.begin(done.open_choices)
        else:
            hand_over.close()
        for first in done.firsts:
            yield first
        if run.emitted:
            delta = await run.deadline.bound(hand_over.first_delta())
            prefill.taken()
            self._observer.handed_over(self._clock() - since)
            yield delta
        while run.emitted:
            yield await run.deadline.bound(hand_over.next())

    async def _alone(self, run: Run, place: Alone) -> AsyncGenerator[TokenDelta, None]:
        leg = run.leg()
        with _prefilling(run, place.owner, leg) as prefill, _assigned(place.owner, leg):
            done = await run.deadline.bound(prefill.done())
        if done.open_choices:
            raise EngineFault("a prefill worker went beyond max_tokens")
        _note_scores(run, done)
        run.settle_on(place.owner)
        for first in done.firsts:
            yield first

    async def _local(self, run: Run, place: Local) -> AsyncGenerator[TokenDelta, None]:
        self._observer.computed_locally(place.reason)
        run.owner, run.current = None, place.seat.worker.identity
        with place.seat, closing(place.seat.submit(run.leg(), None)) as stream:
            run.abort_choice = stream.drop
            while run.emitted:
                delta = await run.deadline.bound(stream.next())
                run.settle_on(place.seat.worker)
                yield delta


def _note_scores(run: Run, done: Prefilled) -> None:
    """Those of the first leg: a later one is not asked for them."""
    if not run.has_emitted:
        run.prompt_logprobs = done.prompt_logprobs


@contextmanager
def _prefilling(run: Run, owner: PrefillWorker, leg: GenerationRequest) -> Iterator[PrefillRun]:
    """The leg's prompt at its owner; the end of the body gives back what is left of it."""
    run.owner = run.current = owner.identity
    with closing(owner.client.prefill(leg)) as prefill:
        yield prefill


@contextmanager
def _assigned(worker: PrefillWorker, leg: GenerationRequest) -> Iterator[None]:
    """Count the leg's tokens as outstanding at the worker during the body."""
    worker.assign(leg.num_tokens)
    try:
        yield
    finally:
        worker.unassign(leg.num_tokens)
