"""What do all intakes of one worker share?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode_worker.config import DecodeWorkerConfig
from decode_worker.credit import CreditBook
from decode_worker.metrics import DecodeMetrics
from decode_worker.peers import Peers
from decode_worker.reader import BlockReader
from engine import Command, Event
from protocol.ids import BlockId
from protocol.ports import Clock
from rpc import EngineLink, Health, TaskSet

Checksum = Callable[[Sequence[BlockId]], list[int]]
"""CRC-32 of each of this worker's blocks. Called in threads; takes as long as it takes to read them."""


@dataclass(frozen=True, slots=True)
class IntakeTools:
    """The worker's parts, as its intakes use them."""

    engine: EngineLink[Command, Event]
    peers: Peers
    reader: BlockReader
    tasks: TaskSet
    health: Health
    metrics: DecodeMetrics
    credit: CreditBook
    config: DecodeWorkerConfig
    block_size: int
    clock: Clock
    checksum: Checksum | None = None
    """Where set, no block is used whose checksum differs from its owner's."""
