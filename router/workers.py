"""Who can take requests: follows the directory and keeps a connection to every worker in it.

listed ──start──> up ──stream breaks──> down ──reconnects──> up
down and not listed: dropped · up and not listed for `absent_grace_s`: used no more, dropped when idle
(a directory that restarts forgets everybody for a moment; that must not stop the service)
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from protocol.errors import EngineFault, SplitserveError, WorkerUnavailable
from protocol.handoff import Fingerprint
from protocol.ids import Role, WorkerIdentity
from protocol.membership import Load, WorkerRecord
from protocol.ports import Clock, Directory
from protocol.wire import splitserve_pb2 as pb
from router.connection import Connect, Connection
from router.links import DecodeLink, PrefillLink, lost
from router.settings import RouterSettings

logger = logging.getLogger(__name__)

LinkT = TypeVar("LinkT", PrefillLink, DecodeLink)


class Member(Generic[LinkT]):
    """One worker that the directory named: its record, its link, and what is outstanding there."""

    def __init__(
        self,
        record: WorkerRecord,
        *,
        connect: Connect,
        make_link: Callable[[Callable[[Any], None]], LinkT],
        ticks: Iterator[int],
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        self.record = record
        self.absent_since: float | None = None
        self.is_forgotten = False
        """Not listed for too long: no new requests."""
        self.num_outstanding = 0
        self.outstanding_tokens = 0
        self.last_assigned = 0
        self.load: Load = record.load
        self.advanced_at: float | None = None
        self.connection: Connection = connect(record, self._on_frame, self._on_broken)
        self.client: LinkT = make_link(self.connection.send)
        self._ticks = ticks
        self._clock = clock
        self._on_change = on_change

    @property
    def identity(self) -> WorkerIdentity:
        return self.record.identity

    @property
    def fingerprint(self) -> Fingerprint:
        return self.record.fingerprint

    @property
    def is_usable(self) -> bool:
        return self.client.is_up and not self.record.draining and not self.is_forgotten

    def assign(self, num_tokens: int) -> None:
        self.num_outstanding += 1
        self.outstanding_tokens += num_tokens
        self.last_assigned = next(self._ticks)

    def unassign(self, num_tokens: int) -> None:
        self.num_outstanding -= 1
        self.outstanding_tokens -= num_tokens

    def _on_frame(self, frame: Any) -> None:
        was_up = self.client.is_up
        try:
            load = self.client.on_frame(frame)
        except ValueError as error:
            # This gives the stream up, so that the worker learns that nobody waits for the rest.
            raise EngineFault(f"{self.identity} sent a frame that makes no sense: {error}") from error
        if _advances(frame, self.load, load):
            self.advanced_at = self._clock()
        if load is not None:
            self.load = load
        if not was_up:
            self._on_change()

    def _on_broken(self, error: SplitserveError) -> None:
        logger.warning("the stream to %s broke: %s", self.identity, error)
        self.client.on_broken(error)
        self._on_change()


def _advances(frame: Any, before: Load, load: Load | None) -> bool:
    """Whether a frame shows work that gets on: tokens, or what other routers' tokens do to the load."""
    if frame.done if isinstance(frame, pb.PrefillFrame) else frame.deltas:
        return True
    if load is None or not (before.num_running and load.num_running):
        return False
    return load.num_waiting_tokens < before.num_waiting_tokens or load.blocks_free < before.blocks_free


AnyMember = Member[PrefillLink] | Member[DecodeLink]


class WorkerSet:
    """The router's `Workers`. Used on one event loop."""

    def __init__(
        self, directory: Directory, connect: Connect, settings: RouterSettings, clock: Clock
    ) -> None:
        self._directory = directory
        self._connect = connect
        self._settings = settings
        self._clock = clock
        self._members: dict[WorkerIdentity, AnyMember] = {}
        self._ticks = itertools.count(1)
        self._changed = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None
        self._connecting: dict[WorkerIdentity, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to follow the directory. Does not wait for any worker. Idempotent."""
        if self._follower is None:
            self._follower = asyncio.create_task(self._follow(), name="follow the directory")

    async def stop(self) -> None:
        """Close all connections; whoever waits for a worker's answer fails. Bounded, idempotent."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.wait([self._follower], timeout=self._settings.stop_timeout_s)
            self._follower = None
        for identity in list(self._members):
            self._drop(identity)
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
            raise WorkerUnavailable("this router is stopped: it shuts down")
        await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _follow(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._settings.frame_timeout_s):
                    records = await self._directory.workers()
            except (SplitserveError, TimeoutError) as error:
                logger.warning("the directory does not answer (%s); the workers known stay", error)
            else:
                self._apply(records)
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

    def _refresh(self, member: AnyMember, record: WorkerRecord) -> None:
        member.record = record
        member.absent_since = None
        member.is_forgotten = False

    def _add(self, record: WorkerRecord) -> None:
        member: AnyMember
        if record.role is Role.PREFILL:
            member = self._member(record, PrefillLink)
        else:
            member = self._member(record, DecodeLink)
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
        try:
            async with asyncio.timeout(timeout_s):
                await member.connection.invalidate_cache(request, timeout_s)
        except SplitserveError as error:
            return error
        except TimeoutError:
            return WorkerUnavailable(f"{member.identity} did not answer within {timeout_s:g} s")
        return None

    def assert_idle(self) -> None:
        """No request waits for any worker."""
        for member in self._members.values():
            member.client.assert_idle()
            assert member.num_outstanding == 0, f"{member.identity}: {member.num_outstanding} outstanding"  # noqa: S101


async def _close(member: AnyMember, connecting: asyncio.Task[None]) -> None:
    await asyncio.wait([connecting])
    await member.connection.close()
