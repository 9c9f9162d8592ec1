"""Who keeps a ticket's lease alive while its blocks are waited for and read?"""

from __future__ import annotations

import asyncio

from decode_worker.owner import Owner
from protocol.errors import LeaseExpired, SplitserveError
from protocol.handoff import Ticket
from protocol.ports import Clock

FIRST_RENEWAL = 0.1
"""Share of the lease after which it is renewed first: nobody knows how much passed on the way here,
and most tickets are done with by then, without any renewal."""


class LeaseKeeper:
    """Renews one lease every third of its length, until it is cancelled or the lease is lost.

    An owner that does not answer is asked again until the lease must have lapsed. `lost` is only an
    early warning: the owner's verdict on the release is what counts.
    """

    def __init__(self, ticket: Ticket, owner: Owner, clock: Clock) -> None:
        self._ticket = ticket
        self._owner = owner
        self._clock = clock
        self._task = asyncio.create_task(self._run(), name="lease keeper")
        self.lost: asyncio.Future[LeaseExpired] = asyncio.get_running_loop().create_future()

    async def stop(self) -> None:
        """Renew no more. Idempotent. Raises what broke the keeper, if anything did."""
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def _run(self) -> None:
        lease_s, renewed_s = self._ticket.lease_s, self._clock()
        wait_s = lease_s * FIRST_RENEWAL
        while True:
            await asyncio.sleep(wait_s)
            wait_s = lease_s / 3
            try:
                status = await self._owner.renew(self._ticket)
            except SplitserveError as error:
                if self._clock() - renewed_s >= lease_s:
                    self.lost.set_result(LeaseExpired(f"{self._ticket.owner} is silent: {error.message}"))
                    return
                continue
            if not status.held:
                self.lost.set_result(LeaseExpired(f"{self._ticket.owner} gave the blocks up"))
                return
            renewed_s = self._clock()
