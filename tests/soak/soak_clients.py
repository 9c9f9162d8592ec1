"""What do the clients of a soak see? They keep a number of requests going and judge every answer."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import httpx
from soak_answers import Json, difference, essence, joined
from soak_cases import Case

DEADLINE_S = 30.0
"""That requests name."""
MARGIN_S = 2.0
"""By which an answer may come later than that."""
DONE = "[DONE]"


class Outcome(StrEnum):
    """How a request ended, for its client."""

    RIGHT = "right"
    WRONG = "wrong"
    FAILED = "failed"
    """An error, told as such."""
    HUNG = "hung"
    LEFT = "left"
    """The client hung up."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One request and what came of it."""

    case: Case
    outcome: Outcome
    started_s: float
    """On the monotonic clock."""
    taken_s: float
    detail: str = ""


class Clients:
    """All clients; each has one request at a time. Used on one event loop."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        cases: Sequence[Case],
        golden: Sequence[Json],
        *,
        seed: int,
        report: Callable[[Judged], None],
    ) -> None:
        """`http` has the server's URL for its base. `report` is called at the end of every request."""
        self._http = http
        self._golden = golden
        self._next_case = _endlessly(cases, seed)
        self._report = report
        self._running: set[asyncio.Task[Judged]] = set()
        self.judged: list[Judged] = []

    async def run(self, concurrency: int, seconds: float, ends_early: Callable[[], bool]) -> float:
        """Keep `concurrency` requests going. Returns how many per second; all have ended by then."""
        started_s, before = time.monotonic(), len(self.judged)
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._ask_on(started_s + seconds, ends_early))
        return (len(self.judged) - before) / (time.monotonic() - started_s)

    def hang_up(self, rng: random.Random) -> str | None:
        """One of the clients leaves; says which request it was."""
        if not self._running:
            return None
        task = rng.choice(sorted(self._running, key=lambda task: task.get_name()))
        task.cancel()
        return task.get_name()

    def counts(self) -> Counter[Outcome]:
        return Counter(judged.outcome for judged in self.judged)

    async def _ask_on(self, until_s: float, ends_early: Callable[[], bool]) -> None:
        while time.monotonic() < until_s and not ends_early():
            case, started_s = next(self._next_case), time.monotonic()
            task = asyncio.create_task(self._ask(case), name=f"case {case.number} at {started_s:.3f}")
            self._running.add(task)
            try:
                await asyncio.wait([task])
            finally:
                self._running.discard(task)
            judged = (
                Judged(case, Outcome.LEFT, started_s, time.monotonic() - started_s)
                if task.cancelled()
                else task.result()
            )
            self.judged.append(judged)
            self._report(judged)

    async def _ask(self, case: Case) -> Judged:
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(DEADLINE_S + MARGIN_S):
                outcome, detail = await self._answer(case)
        except TimeoutError:
            outcome, detail = Outcome.HUNG, f"no end {MARGIN_S:g} s after its deadline"
        except httpx.HTTPError as error:
            outcome, detail = Outcome.FAILED, f"{type(error).__name__}: {error}"
        return Judged(case, outcome, started_s, time.monotonic() - started_s, detail)

    async def _answer(self, case: Case) -> tuple[Outcome, str]:
        headers = {"x-request-timeout": f"{DEADLINE_S:g}"}
        request = self._http.build_request("POST", "/v1/completions", json=case.body, headers=headers)
        response = await self._http.send(request, stream=True)
        try:
            if response.status_code != httpx.codes.OK:
                return Outcome.FAILED, f"{response.status_code}: {(await response.aread()).decode()}"
            if not case.is_streamed:
                return self._judge(case, essence(json.loads(await response.aread())))
            events = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
        finally:
            await response.aclose()
        if not events or events[-1] != DONE:
            return Outcome.FAILED, f"the stream ended with {events[-1] if events else 'nothing'}"
        return self._judge(case, essence(joined([json.loads(event) for event in events[:-1]])))

    def _judge(self, case: Case, found: Json) -> tuple[Outcome, str]:
        wrong = difference(self._golden[case.number], found)
        return (Outcome.RIGHT, "") if wrong is None else (Outcome.WRONG, wrong)


def _endlessly(cases: Sequence[Case], seed: int) -> Iterator[Case]:
    rng = random.Random(f"order {seed}")
    while True:
        yield from rng.sample(cases, len(cases))
