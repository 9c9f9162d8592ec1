"""How far is a prefill, and who keeps its ticket's lease alive while its blocks are waited for and read?

One call to the owner is always under way: it waits there for the next chunk, and renews the lease at
the latest when its time is up. So progress is known at once, a silent owner is found out within
seconds, and an owner sees the call break when its reader dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from decode_worker.owner import ANSWER_LIMIT_S, Owner
from decode_worker.reservation import PrefillPace
from protocol.errors import LeaseExpired, SplitserveError, TransferError, TransferFailed
from protocol.handoff import LeaseStatus, Ticket
from protocol.ports import Clock

MAX_WAIT_S = 1.0
"""How long one call may wait for progress: with this, a cut network is found out in under 5 s."""
SILENCE_LIMIT_S = 3.0
"""An owner whose answer is overdue for so long is taken for dead."""
RETRY_PAUSE_S = 0.1
EARLY_ANSWER_PAUSE_S = 0.05
"""After an answer that neither waited nor brought anything: no owner makes this a busy loop."""


class LeaseKeeper:
    """Asks one owner about one ticket until it is stopped or the lease is lost."""

    def __init__(
        self,
        ticket: Ticket,
        owner: Owner,
        pace: PrefillPace,
        on_lost: Callable[[TransferError], None],
        clock: Clock,
    ) -> None:
        """`on_lost` is only an early warning: the owner's verdict on the release is what counts."""
        self.tokens_ready = ticket.tokens_ready
        self.complete_s: float | None = clock() if ticket.tokens_ready == ticket.num_tokens else None
        """When this side heard that all tokens are ready."""
        self._ticket = ticket
        self._owner = owner
        self._pace = pace
        self._on_lost = on_lost
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._progress: asyncio.Future[None] = self._loop.create_future()
        self._task = asyncio.create_task(self._run(), name="lease keeper")

    @property
    def is_complete(self) -> bool:
        """All tokens are ready."""
        return self.complete_s is not None

    @property
    def progress(self) -> asyncio.Future[None]:
        """Resolves when more tokens are ready than now."""
        return self._progress

    async def stop(self) -> None:
        """Renew no more. Idempotent. Raises what broke the keeper, if anything did."""
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def _run(self) -> None:
        """A keeper that breaks keeps nothing: the KV is void, and `stop` raises what broke it."""
        try:
            lost = await self._keep()
        except Exception as error:
            why = f"the lease at {self._ticket.owner} is not kept any more: {type(error).__name__}: {error}"
            self._on_lost(TransferFailed(why))
            raise
        self._on_lost(lost)

    async def _keep(self) -> TransferError:
        """Returns why the lease is lost."""
        wait_s = 0.0  # at first only: where does it stand?
        overdue_s: float | None = None
        while True:
            asked_s = self._clock()
            try:
                status = await self._renew(wait_s, overdue_s)
            except SplitserveError as error:
                if overdue_s is None:
                    overdue_s = min(self._clock(), asked_s + wait_s)
                left_s = overdue_s + SILENCE_LIMIT_S - self._clock()
                await asyncio.sleep(max(0.0, min(left_s, RETRY_PAUSE_S)))
                if left_s <= RETRY_PAUSE_S:
                    return TransferFailed(f"{self._ticket.owner} is silent: {error.message}")
                wait_s = 0.0
                continue
            if not status.held:
                return LeaseExpired(f"{self._ticket.owner} gave the blocks up")
            overdue_s = None
            if not self._note(status) and self._clock() - asked_s < wait_s / 2:
                await asyncio.sleep(EARLY_ANSWER_PAUSE_S)
            wait_s = min(status.lease_s / 3, MAX_WAIT_S)

    async def _renew(self, wait_s: float, overdue_s: float | None) -> LeaseStatus:
        limit_s = wait_s + ANSWER_LIMIT_S
        if overdue_s is not None:
            limit_s = max(0.0, overdue_s + SILENCE_LIMIT_S - self._clock())
        try:
            async with asyncio.timeout(limit_s):
                return await self._owner.renew(self._ticket, self.tokens_ready, wait_s)
        except TimeoutError as error:
            raise TransferFailed(f"no answer in {limit_s:.1f} s") from error

    def complete(self) -> None:
        """All tokens are ready: somebody else heard so."""
        self._advance(self._ticket.num_tokens)

    def _note(self, status: LeaseStatus) -> bool:
        """Whether there is progress."""
        tokens_ready = min(status.tokens_ready, self._ticket.num_tokens)
        self._pace.note(tokens_ready)
        return self._advance(tokens_ready)

    def _advance(self, tokens_ready: int) -> bool:
        if tokens_ready <= self.tokens_ready:
            return False
        self.tokens_ready = tokens_ready
        if tokens_ready == self._ticket.num_tokens:
            self.complete_s = self._clock()
        self._progress.set_result(None)
        self._progress = self._loop.create_future()
        return True
