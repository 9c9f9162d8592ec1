"""What is known about one worker that the directory named: record, link, what is outstanding there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from protocol import codec
from protocol.errors import EngineFault, SplitserveError
from protocol.handoff import Fingerprint
from protocol.ids import WorkerIdentity
from protocol.membership import Load, WorkerRecord
from protocol.ports import Clock
from protocol.wire import splitserve_pb2 as pb
from router.connection import Connect, Connection
from router.decode_link import DecodeLink
from router.prefill_link import PrefillLink
from router.prefix_memory import PrefixMemory

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
        self.prefixes = PrefixMemory(record.fingerprint.block_size)
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
        was_up, before = self.client.is_up, self.load
        if frame.HasField("load"):  # before the frame's credit wakes those who ask for it
            self.load = codec.load_from_wire(frame.load)
        try:
            self.client.on_frame(frame)
        except ValueError as error:
            # This gives the stream up, so that the worker learns that nobody waits for the rest.
            raise EngineFault(f"{self.identity} sent a frame that makes no sense: {error}") from error
        if _advances(frame, before, self.load):
            self.advanced_at = self._clock()
        if not was_up:
            self._on_change()

    def _on_broken(self, error: SplitserveError) -> None:
        logger.warning("the stream to %s broke: %s", self.identity, error)
        self.client.on_broken(error)
        self._on_change()


def _advances(frame: Any, before: Load, load: Load) -> bool:
    """Whether a frame shows work that gets on: anybody's, also that of one step which lasts."""
    is_prefill = isinstance(frame, pb.PrefillFrame)
    if (is_prefill and (frame.tickets or frame.done)) or (not is_prefill and frame.deltas):
        return True
    return load.progress > before.progress


AnyMember = Member[PrefillLink] | Member[DecodeLink]
