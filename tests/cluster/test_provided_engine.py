"""An engine with memory ahead is that engine, and the blocks that it hands out are provided."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from cluster.provided_engine import ProvidedEngine
from engine import (
    BlocksAllocated,
    Command,
    EngineCore,
    EngineThread,
    Event,
    FakeExecutor,
    ReserveSequence,
    SchedulerConfig,
)
from kv_transfer import PoolMemory, Provision
from protocol.generation import SamplingParams
from protocol.ids import SequenceId
from rpc import Engine

WAIT_LIMIT_S = 20.0
NUM_BLOCKS = 64


def test_blocks_are_provided_when_they_are_handed_out() -> None:
    was_told, is_provided = threading.Event(), threading.Event()
    provided: list[int] = []
    told: list[Event] = []

    def give(address: int, num_bytes: int) -> None:
        provided.append(num_bytes)
        is_provided.set()

    def on_events(events: Sequence[Event]) -> None:
        told.extend(events)
        was_told.set()

    def make(on_events: object) -> Engine[Command]:
        config = SchedulerConfig(num_blocks=NUM_BLOCKS, max_model_len=256)
        core = EngineCore(config, FakeExecutor(config.block_size), frozenset(), lambda: 0.0)
        return EngineThread(core, on_events, "provided")  # type: ignore[arg-type]

    memory = PoolMemory(2**40, NUM_BLOCKS, 100)  # nobody touches it
    provision = Provision(memory, ahead_bytes=0, start_delay_s=WAIT_LIMIT_S, give=give)
    engine = ProvidedEngine(make, provision, on_events)
    engine.start()
    engine.post(ReserveSequence(SequenceId("s"), tuple(range(40)), SamplingParams(max_tokens=4)))
    assert was_told.wait(WAIT_LIMIT_S)
    assert is_provided.wait(WAIT_LIMIT_S)
    assert engine.alive
    assert engine.fault is None
    assert engine.stats.num_fetching == 1
    engine.stop(WAIT_LIMIT_S)
    assert not engine.alive
    (allocated,) = (event for event in told if isinstance(event, BlocksAllocated))
    assert provision.num_provided == max(allocated.block_ids) + 1
    assert sum(provided) == provision.num_provided * memory.block_bytes
