"""Whether the service works from end to end: a tiny hand-off of the router's own when users make none."""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import aclosing

from protocol.errors import DeadlineExceeded, Overloaded, SplitserveError
from protocol.generation import GenerationRequest, SamplingParams
from protocol.ids import RequestId, Role, WorkerIdentity
from protocol.ports import Clock
from router.orchestrator import Orchestrator
from router.ports import Workers, num_usable
from router.settings import RouterSettings

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_PROMPT = (0, 0, 0, 0)
"""Token 0 is in every vocabulary."""
_PRIORITY = -(2**31)
"""Before all users' requests: it asks for next to nothing, and whether the service works matters to all."""


class Canary:
    """Generates two tokens, one at each role, whenever no hand-off succeeded for a while."""

    def __init__(
        self, orchestrator: Orchestrator, workers: Workers, settings: RouterSettings, clock: Clock
    ) -> None:
        self._orchestrator = orchestrator
        self._workers = workers
        self._settings = settings
        self._clock = clock
        self._last_error: SplitserveError | None = None
        self._crowded_out_at: WorkerIdentity | None = None
        """The worker that had no time for the last hand-off, if that is all that was wrong."""

    def obstacle(self) -> str | None:
        """Why the service is not ready, or None when it is: a hand-off succeeded recently.

        One that a worker had no time for proves nothing while that worker gets on with other work.
        """
        for role in Role:
            if not num_usable(self._workers, role):
                return f"no usable {role.value} worker"
        age_s = self._age_s()
        if age_s is not None and (age_s <= self._window_s or self._is_crowded_out()):
            return None
        if self._last_error is not None:
            return f"the last hand-off failed: {self._last_error.message}"
        return "no hand-off yet" if age_s is None else f"the last hand-off was {age_s:.0f} s ago"

    @property
    def _window_s(self) -> float:
        """How recent is recent."""
        return self._settings.canary_interval_s + 2 * self._settings.canary_timeout_s

    def _is_crowded_out(self) -> bool:
        for worker in (*self._workers.prefill_workers(), *self._workers.decode_workers()):
            if worker.identity == self._crowded_out_at and worker.advanced_at is not None:
                return self._clock() - worker.advanced_at <= self._window_s
        return False

    def _age_s(self) -> float | None:
        last = self._orchestrator.last_handoff
        return None if last is None else self._clock() - last

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if self._is_due():
                await self._sing()
            try:
                async with asyncio.timeout(_RETRY_S):
                    await self._workers.changed()
            except TimeoutError:
                continue

    def _is_due(self) -> bool:
        age_s = self._age_s()
        is_old = age_s is None or age_s >= self._settings.canary_interval_s
        return is_old and all(num_usable(self._workers, role) for role in Role)

    async def _sing(self) -> None:
        name = f"canary-{uuid.uuid4().hex}"
        request = GenerationRequest(
            request_id=RequestId(name),
            prompt_token_ids=_PROMPT,
            sampling=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
            deadline_s=self._settings.canary_timeout_s,
            priority=_PRIORITY,
            cache_salt=name,  # never cached: what is not moved proves nothing
        )
        generation = self._orchestrator.prove(request)
        try:
            async with aclosing(generation) as deltas:
                async for _ in deltas:
                    pass
        except SplitserveError as error:
            self._last_error = error
            is_busy = isinstance(error, DeadlineExceeded | Overloaded)
            self._crowded_out_at = generation.current if is_busy else None
            # What a worker had no time for, since it gets on with other work, need not alarm anybody.
            level = logging.INFO if self._is_crowded_out() else logging.WARNING
            logger.log(level, "the canary's hand-off failed: %s: %s", type(error).__name__, error)
        else:
            self._last_error = None
            self._crowded_out_at = None
