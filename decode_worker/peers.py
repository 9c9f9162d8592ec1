"""Which owners is this decode worker connected to?

Connections are made before they are needed, from the directory, so that no request pays for one. An
owner is known by its full identity: a restarted worker is another owner, with another agent name.

    UNKNOWN ──directory or ticket──> KNOWN ──handshake──> CONNECTED ──failed read──> STALE ──> (handshake)
                                       └──── missing in the directory for a while, and unused ────> gone
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from decode_worker.owner import Owner, OwnerHello
from decode_worker.reader import BlockReader
from decode_worker.reservation import Rate
from kv_transfer import check_compatible
from protocol.errors import LayoutMismatch, SplitserveError, TransferFailed
from protocol.handoff import Fingerprint
from protocol.ids import Role, WorkerIdentity
from protocol.membership import WorkerRecord
from protocol.ports import Clock

_log = logging.getLogger(__name__)

CONNECT_AHEAD_S = 1.0
"""How long a look at the directory waits for the handshakes that it caused."""


class Peer:
    """One owner. Used on one event loop."""

    def __init__(
        self,
        identity: WorkerIdentity,
        owner: Owner,
        *,
        reader: BlockReader,
        fingerprint: Fingerprint,
        connect_timeout_s: float,
        now_s: float,
    ) -> None:
        self.identity = identity
        self.owner = owner
        self.num_users = 0
        self.num_reading = 0
        """Reads that the transport has not ended; the connection stays while there are any."""
        self.last_seen_s = now_s
        self.block_size = fingerprint.block_size
        """Of the owner's pool, once it is connected."""
        self.prefill_rate = Rate()
        """Tokens per second of one of its prefills."""
        self.read_rate = Rate()
        """Tokens per second of one read from it."""
        self._trouble = ""
        """Why the last handshake failed."""
        self._reader = reader
        self._fingerprint = fingerprint
        self._connect_timeout_s = connect_timeout_s
        self._agent: str | None = None
        self._is_stale = False
        self._flight: asyncio.Task[str] | None = None
        """The handshake under way, or the last one."""

    @property
    def connected(self) -> bool:
        return self._agent is not None

    async def connect(self) -> str:
        """The name of the owner's transport agent; shakes hands unless that has been done.

        Raises `LayoutMismatch`, or `TransferFailed` when the owner cannot be reached.
        """
        return await asyncio.shield(self.handshake())

    def handshake(self) -> asyncio.Future[str]:
        """What `connect` waits for, shared by all who wait now: an owner that does not answer costs them
        one time limit together, not one after the other. Not to be cancelled."""
        if self._flight is None or self._flight.done():
            self._flight = asyncio.create_task(self._connect(), name=f"handshake with {self.identity}")
            self._flight.add_done_callback(self._landed)
        return self._flight

    def mark_stale(self) -> None:
        """A read from it failed: connect anew before the next one, once no other is pending."""
        self._is_stale = True

    async def close(self) -> None:
        """Disconnect, unless a read is pending that may never end. Nobody waits for a handshake then."""
        if self._flight is not None:
            self._flight.cancel()
            await asyncio.wait([self._flight])
        try:
            if self.num_reading == 0:
                await self._disconnect()
        except TransferFailed as error:
            _log.warning("%s stays connected: %s", self.identity, error.message)
        await self.owner.close()

    async def _connect(self) -> str:
        if self._is_stale and self.num_reading == 0:
            await self._disconnect()
        if self._agent is None:
            self._agent = await self._shake_hands()
        return self._agent

    def _landed(self, flight: asyncio.Task[str]) -> None:
        """Those who waited get the error, too; there may be none of them left."""
        if flight.cancelled():
            return
        error = flight.exception()
        trouble = "" if error is None else getattr(error, "message", repr(error))
        if trouble and trouble != self._trouble:  # said once, not every second
            _log.warning("no connection to %s: %s", self.identity, trouble)
        self._trouble = trouble

    async def _shake_hands(self) -> str:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                hello = await self.owner.connect()
                self._check(hello)
                await self._reader.connect(hello.endpoint, hello.fingerprint)
        except TimeoutError as error:
            raise TransferFailed(
                f"the handshake with {self.identity} took over {self._connect_timeout_s:g} s"
            ) from error
        except (LayoutMismatch, TransferFailed):
            raise
        except SplitserveError as error:
            raise TransferFailed(f"cannot connect to {self.identity}: {error.message}") from error
        self.block_size = hello.fingerprint.block_size
        return hello.endpoint.agent

    def _check(self, hello: OwnerHello) -> None:
        if hello.identity != self.identity:
            raise TransferFailed(f"where {self.identity} was there is {hello.identity} now")
        check_compatible(self._fingerprint, hello.fingerprint)

    async def _disconnect(self) -> None:
        """Raises `TransferFailed`; the agent counts as gone whether or not that worked."""
        agent, self._agent = self._agent, None
        self._is_stale = False
        if agent is None:
            return
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._reader.disconnect(agent)
        except TimeoutError as error:
            raise TransferFailed(
                f"the transport did not let go of {agent} in {self._connect_timeout_s:g} s"
            ) from error


class Peers:
    """All owners this worker knows. Used on one event loop."""

    def __init__(
        self,
        make_owner: Callable[[str], Owner],
        reader: BlockReader,
        fingerprint: Fingerprint,
        *,
        connect_timeout_s: float,
        forget_after_s: float,
        clock: Clock,
    ) -> None:
        """`make_owner` gets the address of the owner's gRPC server."""
        self._make_owner = make_owner
        self._reader = reader
        self._fingerprint = fingerprint
        self._connect_timeout_s = connect_timeout_s
        self._forget_after_s = forget_after_s
        self._clock = clock
        self._peers: dict[WorkerIdentity, Peer] = {}

    @property
    def num_connected(self) -> int:
        return sum(peer.connected for peer in self._peers.values())

    @property
    def num_used(self) -> int:
        """Peers that some ticket needs."""
        return sum(peer.num_users > 0 for peer in self._peers.values())

    @contextmanager
    def use(self, identity: WorkerIdentity, address: str) -> Iterator[Peer]:
        """The peer, kept for as long as the block runs. Does no I/O."""
        peer = self._known(identity, address)
        peer.num_users += 1
        try:
            yield peer
        finally:
            peer.num_users -= 1
            peer.last_seen_s = self._clock()

    async def refresh(self, records: Iterable[WorkerRecord]) -> None:
        """Connect to the owners that live, and forget those that were not seen for a while.

        Handshakes that take long go on by themselves: they hold up no owner that comes later. Whoever
        needs an owner that could not be connected gets the error again, with a request to fail.
        """
        owners = [record for record in records if record.role is Role.PREFILL]
        for record in owners:
            self._known(record.identity, record.address).last_seen_s = self._clock()
        await self._forget_missing()
        peers = [self._peers[owner.identity] for owner in owners]
        flights = [peer.handshake() for peer in peers if not peer.connected]
        if flights:
            await asyncio.wait(flights, timeout=CONNECT_AHEAD_S)

    async def close(self) -> None:
        """Drop all connections, at the same time: one that hangs does not hold up the others."""
        peers, self._peers = list(self._peers.values()), {}
        await asyncio.gather(*(peer.close() for peer in peers))

    def _known(self, identity: WorkerIdentity, address: str) -> Peer:
        peer = self._peers.get(identity)
        if peer is None:
            owner = self._make_owner(address)
            peer = Peer(
                identity,
                owner,
                reader=self._reader,
                fingerprint=self._fingerprint,
                connect_timeout_s=self._connect_timeout_s,
                now_s=self._clock(),
            )
            self._peers[identity] = peer
        return peer

    async def _forget_missing(self) -> None:
        seen_since_s = self._clock() - self._forget_after_s
        for identity, peer in list(self._peers.items()):
            is_used = peer.num_users > 0 or peer.num_reading > 0
            if not is_used and peer.last_seen_s < seen_since_s:
                del self._peers[identity]
                await peer.close()
