"""Who can take requests: follows the directory and keeps a connection to every worker in it.

listed ──start──> up ──stream breaks──> down ──reconnects──> up
down and not listed: dropped · up and not listed for `absent_grace_s`: used no more, dropped when idle
(a directory that restarts forgets everybody for a moment; that must not stop the service)
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from protocol.errors import EngineFault, SplitserveError, WorkerUnavailable
from protocol.ids import Role, WorkerIdentity
from protocol.membership import WorkerRecord
from protocol.ports import Clock, Directory
from protocol.wire import splitserve_pb2 as pb
from router.connection import Connect
from router.credit import CreditAccount, CreditQueue
from router.decode_link import DecodeLink
from router.member import AnyMember, LinkT, Member
from router.prefill_link import PrefillLink, lost
from router.settings import RouterSettings

logger = logging.getLogger(__name__)


class WorkerSet:
    """The router's `Workers`. Used on one event loop."""

    def __init__(
        self, directory: Directory, connect: Connect, settings: RouterSettings, clock: Clock
    ) -> None:
        self._directory = directory
        self._connect = connect
        self._settings = settings
        self._clock = clock
        self.credits = CreditQueue(clock)
        self._members: dict[WorkerIdentity, AnyMember] = {}
        self._prefill_absent_since: float | None = clock()
        self._ticks = itertools.count(1)
        self._changed = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None
        self._connecting: dict[WorkerIdentity, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to follow the directory. Does not wait for any worker. Idempotent."""
        if self._follower is None:
            self.credits.open()
            self._follower = asyncio.create_task(self._follow(), name="follow the directory")

    async def stop(self) -> None:
        """Close all connections; whoever waits for a worker's answer fails. Bounded, idempotent."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.wait([self._follower], timeout=self._settings.stop_timeout_s)
            self._follower = None
        for identity in list(self._members):
            self._drop(identity)
        self.credits.close(stopped())
        self._notify()
        if self._closing:
            await asyncio.wait(set(self._closing), timeout=self._settings.stop_timeout_s)

    def check(self) -> None:
        """Raise `EngineFault` when the directory is no longer followed, or a worker no longer tried."""
        follower = self._follower
        if follower is None or follower.done():
            cause = follower.exception() if follower and not follower.cancelled() else None
            raise EngineFault("the router does not follow the directory any more") from cause
        for identity, connecting in self._connecting.items():
            if connecting.done() and not connecting.cancelled() and connecting.exception() is not None:
                raise EngineFault(f"the router gave {identity} up") from connecting.exception()

    def prefill_workers(self) -> list[Member[PrefillLink]]:
        return [m for m in self._members.values() if isinstance(m.client, PrefillLink) and m.is_usable]

    def decode_workers(self) -> list[Member[DecodeLink]]:
        return [m for m in self._members.values() if isinstance(m.client, DecodeLink) and m.is_usable]

    async def changed(self) -> None:
        if self._follower is None:
            raise stopped()
        await self._changed.wait()

    @property
    def prefill_absent_since(self) -> float | None:
        return self._prefill_absent_since

    def _notify(self) -> None:
        if self.prefill_workers():
            self._prefill_absent_since = None
        elif self._prefill_absent_since is None:
            self._prefill_absent_since = self._clock()
        self._changed.set()
        self._changed = asyncio.Event()
        self.credits.workers_changed()

    async def _follow(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._settings.frame_timeout_s):
                    records = await self._directory.workers()
            except (SplitserveError, TimeoutError) as error:
                logger.warning("the directory does not answer (%s); the workers known stay", error)
            else:
                self._apply(records)
            self._tell_demand()
            await asyncio.sleep(self._settings.poll_interval_s)

    def _apply(self, records: tuple[WorkerRecord, ...]) -> None:
        """Bring the members in line with what the directory lists."""
        listed = {record.identity: record for record in records}
        before = {identity for identity, member in self._members.items() if member.is_usable}
        for identity, record in listed.items():
            if identity in self._members:
                self._refresh(self._members[identity], record)
            else:
                self._add(record)
        for identity in [i for i in self._members if i not in listed]:
            self._miss(self._members[identity])
        if before != {identity for identity, member in self._members.items() if member.is_usable}:
            self._notify()

    def _tell_demand(self) -> None:
        """Each decode worker hears its share of what waits here: whoever scales their pool has to know."""
        workers = self.decode_workers()
        num_tokens = self.credits.num_waiting_tokens / max(1, len(workers))
        for worker in workers:
            worker.client.demand(math.ceil(num_tokens / worker.fingerprint.block_size))

    def _refresh(self, member: AnyMember, record: WorkerRecord) -> None:
        member.record = record
        member.absent_since = None
        member.is_forgotten = False

    def _add(self, record: WorkerRecord) -> None:
        member: AnyMember
        if record.role is Role.PREFILL:
            member = self._member(record, PrefillLink)
        else:
            credit = CreditAccount(self.credits.wake)
            member = self._member(record, partial(DecodeLink, credit=credit))
        self._members[record.identity] = member
        self._connecting[record.identity] = asyncio.create_task(
            self._start(member), name=f"connect to {record.identity}"
        )

    def _member(
        self, record: WorkerRecord, make_link: Callable[[Callable[[Any], None]], LinkT]
    ) -> Member[LinkT]:
        return Member(
            record,
            connect=self._connect,
            make_link=make_link,
            ticks=self._ticks,
            clock=self._clock,
            on_change=self._notify,
        )

    async def _start(self, member: AnyMember) -> None:
        """Try until it works; a worker that dies before is dropped when the directory forgets it."""
        backoff_s = self._settings.reconnect_backoff_s
        while True:
            try:
                return await member.connection.start()
            except SplitserveError as error:
                logger.info("cannot connect to %s yet: %s", member.identity, error)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, 16 * self._settings.reconnect_backoff_s)

    def _miss(self, member: AnyMember) -> None:
        """The directory does not list this member now."""
        now = self._clock()
        if member.absent_since is None:
            member.absent_since = now
        member.is_forgotten = now - member.absent_since >= self._settings.absent_grace_s
        if not member.client.is_up or (member.is_forgotten and member.num_outstanding == 0):
            self._drop(member.identity)

    def _drop(self, identity: WorkerIdentity) -> None:
        member = self._members.pop(identity)
        connecting = self._connecting.pop(identity)
        connecting.cancel()
        member.client.on_broken(lost(str(identity)))
        closing = asyncio.create_task(_close(member, connecting), name=f"close {identity}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self._notify()

    async def scrape(self) -> list[tuple[WorkerRecord, str]]:
        """Every connected worker's metrics; one that does not answer in time is left out."""
        members = [member for member in self._members.values() if member.client.is_up]
        answers = await asyncio.gather(*(self._scrape(member) for member in members))
        return [answer for answer in answers if answer is not None]

    async def _scrape(self, member: AnyMember) -> tuple[WorkerRecord, str] | None:
        try:
            async with asyncio.timeout(self._settings.metrics_timeout_s):
                exposition = await member.connection.metrics(self._settings.metrics_timeout_s)
        except (SplitserveError, TimeoutError) as error:
            logger.info("%s does not tell its metrics: %s", member.identity, error)
            return None
        return member.record, exposition

    async def invalidate_cache(
        self, request: pb.InvalidateCacheRequest
    ) -> list[tuple[WorkerRecord, SplitserveError | None]]:
        """Every known worker, with the reason when it was not reached.

        Prefill workers come first: a ticket that is offered afterwards holds nothing stale, and so cannot
        bring it to a decode worker that has forgotten it.
        """
        reached: list[tuple[WorkerRecord, SplitserveError | None]] = []
        for role in (Role.PREFILL, Role.DECODE):
            members = [member for member in self._members.values() if member.record.role is role]
            errors = await asyncio.gather(*(self._invalidate(member, request) for member in members))
            reached += [(member.record, error) for member, error in zip(members, errors, strict=True)]
        return reached

    async def _invalidate(
        self, member: AnyMember, request: pb.InvalidateCacheRequest
    ) -> SplitserveError | None:
        timeout_s = self._settings.admin_timeout_s
        member.prefixes.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await member.connection.invalidate_cache(request, timeout_s)
        except SplitserveError as error:
            return error
        except TimeoutError:
            return WorkerUnavailable(f"{member.identity} did not answer within {timeout_s:g} s")
        return None

    def assert_idle(self) -> None:
        """No request waits for any worker, or for its credit."""
        self.credits.assert_idle()
        for member in self._members.values():
            member.client.assert_idle()
            assert member.num_outstanding == 0, f"{member.identity}: {member.num_outstanding} outstanding"  # noqa: S101


def stopped() -> WorkerUnavailable:
    """The error of all that wait for a worker when the router stops."""
    return WorkerUnavailable("this router is stopped: it shuts down")


async def _close(member: AnyMember, connecting: asyncio.Task[None]) -> None:
    await asyncio.wait([connecting])
    await member.connection.close()
