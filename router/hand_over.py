"""From a ticket to a decode worker's first delta: how one prompt's KV finds its reader.

offer ──begin (once the first tokens are there)──> first delta: taken over
  └──reader lost before that──> the same ticket is offered to another one, the owner still holds it
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from protocol.errors import SplitserveError, WorkerUnavailable
from protocol.generation import GenerationRequest, Token, TokenDelta
from protocol.handoff import Ticket
from router.placement import Placement
from router.ports import DecodeWorker, Prefilled, PrefillRun, PrefillWorker, TokenStream
from router.run import Run
from router.seat import Paired

REOFFER_WAIT_S = 0.7
"""For another reader. The owner of a finished prompt holds its blocks about so long without one."""


class HandOver:
    """Offers one ticket while the prompt is still computed, again if need be. A context manager.

    Its end aborts what runs at the reader.
    """

    def __init__(
        self,
        run: Run,
        leg: GenerationRequest,
        ticket: Ticket,
        place: Paired,
        placement: Placement,
    ) -> None:
        self._run = run
        self._leg = leg
        self._ticket = ticket
        self._owner = place.owner
        self._seat = place.seat
        self._placement = placement
        self._stream: TokenStream | None = None
        self._first_tokens: list[tuple[int, Token]] | None = None
        self._taken: asyncio.Task[TokenDelta] = asyncio.create_task(
            self._until_taken(), name=f"hand-over of {leg.request_id}"
        )

    @property
    def ends(self) -> tuple[PrefillWorker, DecodeWorker]:
        """The owner, and the reader that has the ticket now or had it last."""
        return self._owner, self._seat.worker

    async def prefilled(self, prefill: PrefillRun) -> Prefilled:
        """What the prefill comes to. Raises what is wrong with it, or with all its readers."""
        done = asyncio.ensure_future(prefill.done())
        try:
            await asyncio.wait({done, self._taken}, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                self._run.current = self._seat.worker.identity
                self._taken.result()  # raises: no delta comes before `begin`
            return done.result()
        finally:
            done.cancel()

    def begin(self, first_tokens: list[tuple[int, Token]]) -> None:
        """The prefill is done; these are the choices that go on."""
        self._first_tokens = first_tokens
        self._run.current = self._seat.worker.identity
        if self._stream is not None:
            self._stream.begin(first_tokens)

    async def first_delta(self) -> TokenDelta:
        """The reader has taken the KV over. Raises what the last reader raised."""
        return await self._taken

    async def next(self) -> TokenDelta:
        """After the first delta: the next one."""
        assert self._stream is not None, "the first delta came from a stream"  # noqa: S101
        return await self._stream.next()

    def drop(self, index: int) -> None:
        """Abort one choice; a later reader is not told of it at all."""
        if self._stream is not None:
            self._stream.drop(index)

    async def _until_taken(self) -> TokenDelta:
        while True:
            try:
                self._stream = self._offer()
                return await self._stream.next()
            except WorkerUnavailable as error:
                await self._another_seat(error)

    def _offer(self) -> TokenStream:
        stream = self._seat.submit(self._run.offer(self._leg), self._ticket)
        if self._first_tokens is not None:
            self._run.current = self._seat.worker.identity
            wanted = [choice for choice in self._first_tokens if choice[0] in self._run.emitted]
            if wanted:  # else the client has dropped all, and this ends in a moment
                stream.begin(wanted)
        return stream

    async def _another_seat(self, error: WorkerUnavailable) -> None:
        """Raises `error` when there is none in time, or the request has had its share of failures."""
        self._stream = None
        self._seat.release()
        self._run.failed.add(self._seat.worker.identity)
        if not self._run.may_fail_again:
            raise error
        try:
            self._seat = await self._placement.other_seat(self._run, self._leg, self._owner, REOFFER_WAIT_S)
        except TimeoutError:
            raise error from None
        self._run.count_failure()

    async def __aenter__(self) -> HandOver:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        await asyncio.wait([self._taken])
        bug = None if self._taken.cancelled() else self._taken.exception()
        if bug is not None and not isinstance(bug, SplitserveError):
            raise bug

    def close(self) -> None:
        """Abort at the reader what has not ended. Idempotent."""
        self._taken.cancel()
        if self._stream is not None:
            self._stream.close()
        self._seat.release()
