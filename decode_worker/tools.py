"""What do all intakes of one worker share?"""

from __future__ import annotations

from dataclasses import dataclass

from decode_worker.config import DecodeWorkerConfig
from decode_worker.credit import CreditBook
from decode_worker.metrics import DecodeMetrics
from decode_worker.peers import Peers
from decode_worker.reader import BlockReader
from engine import Command, Event
from protocol.ports import Clock
from rpc import EngineLink, Health, TaskSet


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
