"""One user request from admission to the last piece of its answers."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from protocol.errors import RequestCancelled, SplitserveError
from protocol.ports import Clock
from router.admission import Admission
from router.answers import Answers, Piece, TextRequest
from router.metrics import RequestTimer, RouterMetrics
from router.orchestrator import Orchestrator
from router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Service:
    """Admits requests, runs them, and turns their tokens into text. Used on one event loop."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        admission: Admission,
        tokenizer: Tokenizer,
        metrics: RouterMetrics,
        clock: Clock,
    ) -> None:
        self._orchestrator = orchestrator
        self._admission = admission
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._clock = clock

    async def answer(self, request: TextRequest) -> AsyncGenerator[Piece, None]:
        """The answer piece by piece, those of several choices mixed; the last one of each has a finish
        reason.

        Closing the generator aborts the request everywhere. Raises `SplitserveError` only.
        """
        timer = RequestTimer(self._metrics, self._clock)
        try:
            async with aclosing(self._admitted(request, timer)) as pieces:
                async for piece in pieces:
                    yield piece
        except SplitserveError as error:
            timer.failed(error)
            raise
        except BaseException:  # closed or cancelled: the client went away
            timer.failed(RequestCancelled("the client went away"))
            raise

    async def _admitted(self, request: TextRequest, timer: RequestTimer) -> AsyncGenerator[Piece, None]:
        generation = request.generation
        deadline = self._clock() + generation.deadline_s
        async with self._admission.place(generation.priority, generation.deadline_s):
            timer.admitted()
            remaining_s = max(deadline - self._clock(), 0.0)
            answers = Answers(request, self._tokenizer)
            deltas = self._orchestrator.generate(replace(generation, deadline_s=remaining_s))
            async with aclosing(deltas):
                async for delta in deltas:
                    if (prompt := answers.prompt(delta.index, deltas.prompt_logprobs)) is not None:
                        yield prompt
                    timer.waited(delta.receipt)
                    piece = answers.push(delta)
                    timer.tokens(len(piece.tokens), piece.index)
                    if piece.finish_reason is not None:
                        deltas.drop(
                            piece.index
                        )  # a stop string ended it: abort before a slow client reads on
                    if answers.is_complete:
                        await deltas.aclose()
                        timer.finished(piece)
                        break
                    yield piece
        yield piece
