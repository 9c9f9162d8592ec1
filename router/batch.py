"""Several prompts of one body: each runs as a request of its own, and their pieces make one answer.

The choices are numbered prompt by prompt, as OpenAI does: choice j of prompt i is number i * n + j. Usage
is that of all of them. The first failure is that of all: the others are aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from router.answers import Piece, TextRequest, Usage

Pieces = AsyncGenerator[Piece, None]
Answer = Callable[[TextRequest], Pieces]

_Arrival = tuple[int, Piece | Exception | None]
"""Which request, and its next piece, its failure, or None at its end."""


def answer_together(requests: Sequence[TextRequest], answer: Answer) -> Pieces:
    """The pieces of all requests, at least one, which all have the same number of choices.

    Closing the generator closes those of all requests. Raises what `answer` raises.
    """
    return answer(requests[0]) if len(requests) == 1 else _merged(requests, answer)


async def _merged(requests: Sequence[TextRequest], answer: Answer) -> Pieces:
    arrivals: asyncio.Queue[_Arrival] = asyncio.Queue(maxsize=len(requests))  # a slow client holds all up
    usages = [Usage(len(r.generation.prompt_token_ids), 0, 0) for r in requests]
    num_choices = requests[0].generation.n
    tasks = [
        asyncio.create_task(_forward(at, answer(request), arrivals), name=f"prompt {at}")
        for at, request in enumerate(requests)
    ]
    try:
        num_open = len(tasks)
        while num_open:
            at, arrival = await arrivals.get()
            if arrival is None:
                num_open -= 1
            elif isinstance(arrival, Exception):
                raise arrival
            else:
                usages[at] = arrival.usage
                yield replace(arrival, index=at * num_choices + arrival.index, usage=_sum(usages))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(at: int, pieces: Pieces, arrivals: asyncio.Queue[_Arrival]) -> None:
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                await arrivals.put((at, piece))
    except Exception as error:  # raised by the one who waits for the arrivals
        await arrivals.put((at, error))
    else:
        await arrivals.put((at, None))


def _sum(usages: Sequence[Usage]) -> Usage:
    return Usage(
        sum(usage.num_prompt_tokens for usage in usages),
        sum(usage.num_output_tokens for usage in usages),
        sum(usage.num_cached_tokens for usage in usages),
    )
