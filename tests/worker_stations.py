"""What a real worker of a test is built from: a real engine on a fake device, memory, a transport."""

from __future__ import annotations

import time
from typing import Any

from worker_fakes import BLOCK_SIZE, CLUSTER_TOKEN, PoolKv

from engine import EngineCore, EngineThread, SchedulerConfig
from engine.fake_executor import FakeExecutor
from kv_transfer import (
    FaultKind,
    FaultyTransport,
    LayoutReader,
    LoopbackNetwork,
    LoopbackTransport,
    PoolMemory,
    agent_name,
)
from kv_transfer.checksums import TakeChecksums
from protocol.faults import Fault, FaultPlan
from protocol.handoff import Fingerprint
from protocol.ids import WorkerIdentity
from protocol.ports import KvTransport
from rpc import WorkerProfile

NUM_BLOCKS = 64
MAX_MODEL_LEN = 200


class CountedFaults(FaultPlan[FaultKind]):
    """Counts the reads."""

    num_reads = 0

    def take(self) -> Fault[FaultKind] | None:
        self.num_reads += 1
        return super().take()


class Station:
    """An engine core that can be slowed down and broken."""

    def __init__(self, identity: WorkerIdentity, network: LoopbackNetwork, **scheduler: Any) -> None:
        """`scheduler`: settings of the scheduler that differ from the defaults."""
        kv, memory = PoolKv.allocate(NUM_BLOCKS)
        self.memory = memory
        self.executor = FakeExecutor(BLOCK_SIZE, kv=kv)
        self.gate_s = 0.0
        config = SchedulerConfig(
            num_blocks=NUM_BLOCKS, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, **scheduler
        )
        self.core = EngineCore(config, self, frozenset(), time.monotonic)
        self.read_faults = CountedFaults()
        self._identity, self._network = identity, network
        self.transport = self._make_transport(memory, 0)
        self.breaks = False

    def reader(self, fingerprint: Fingerprint, checksum: TakeChecksums | None = None) -> LayoutReader:
        """What a decode worker reads with; it owns the transport then."""
        return LayoutReader(
            self.memory,
            fingerprint,
            lambda memory, serial: self._make_transport(memory, serial) if serial else self.transport,
            checksum=checksum,
        )

    def _make_transport(self, memory: PoolMemory, serial: int) -> KvTransport:
        transport = LoopbackTransport(memory, agent_name(self._identity, 0, serial), self._network)
        return FaultyTransport(transport, memory, self.read_faults)

    def execute(self, plan: Any) -> Any:
        if self.breaks:
            raise ZeroDivisionError("the device is gone")
        time.sleep(self.gate_s)
        return self.executor.execute(plan)

    def engine(self, on_events: Any) -> EngineThread:
        return EngineThread(self.core, on_events, "engine", idle_wait_s=0.05)


def profile(identity: WorkerIdentity, fingerprint: Fingerprint) -> WorkerProfile:
    return WorkerProfile(identity, fingerprint, max_model_len=MAX_MODEL_LEN, cluster_token=CLUSTER_TOKEN)
