"""Workers that note when what happens (see `stamps`): of the demo model, or such that compute nothing.

Those that compute nothing have pools of a real model's size: what is left is the hand-off. Everything
else is as in any cluster: engine, scheduler, leases, gRPC, NIXL. A step takes no time there, and samples
the same token always. `build_model`, `build_demo` and `build_llama_8b` are for `ProcessCluster(build=...)`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from block_shapes import SHAPES, block_bytes
from stamps import StampedEngine, StampedReader, StampFile

from cluster.process_main import Worker
from cluster.process_spec import ProcessSpec
from cluster.ranks import RankLauncher
from decode_worker import DecodeWorker, DecodeWorkerConfig
from engine import Command, EngineCore, EngineThread, Event, SchedulerConfig, StepPlan, StepResult
from kv_transfer import LayoutReader, PoolMemory, agent_name, create_transport
from prefill_worker import PrefillWorker, PrefillWorkerConfig
from protocol.generation import Token
from protocol.handoff import Fingerprint
from protocol.ids import Role, WorkerId, WorkerIdentity
from protocol.ports import Directory, KvTransport
from rpc import Engine, WorkerProfile

MAX_MODEL_LEN = 4352
NUM_BLOCKS = 320
ONE_CHUNK = 8192
TOKEN = Token(1000)

OnEvents = Callable[[Sequence[Event]], None]


class BlankExecutor:
    """Samples where a slice is due; touches no KV."""

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult([TOKEN if piece.samples else None for piece in plan.slices])


def build_model(spec: ProcessSpec, directory: Directory, _: RankLauncher) -> Worker:
    from cluster.compose import open_model
    from cluster.engine_parts import build_engine

    config = spec.cluster_config()
    pool = config.prefill if spec.role is Role.PREFILL else config.decode
    parts = build_engine(config, pool, open_model(config))
    make = _Parts(
        parts.fingerprint,
        parts.scheduler.max_model_len,
        parts.pool_memory,
        lambda on_events: parts.make_thread("engine", on_events),
    )
    return _build(spec, directory, make)


def build_demo(spec: ProcessSpec, directory: Directory, _: RankLauncher) -> Worker:
    return _build(spec, directory, _blank(spec, SHAPES["demo"]))


def build_llama_8b(spec: ProcessSpec, directory: Directory, _: RankLauncher) -> Worker:
    return _build(spec, directory, _blank(spec, SHAPES["llama_8b"]))


@dataclass(frozen=True)
class _Parts:
    fingerprint: Fingerprint
    max_model_len: int
    memory: PoolMemory
    make_engine: Callable[[OnEvents], Engine[Command]]


def _blank(spec: ProcessSpec, shape: Fingerprint) -> _Parts:
    fingerprint = replace(shape, model=spec.cluster_config().model_name)
    return _Parts(fingerprint, MAX_MODEL_LEN, _filled_pool(block_bytes(shape)), _make_blank_engine)


def _build(spec: ProcessSpec, directory: Directory, parts: _Parts) -> Worker:
    assert spec.role is not None
    stamps = StampFile(Path(spec.log_path))
    identity = WorkerIdentity(WorkerId(spec.name), secrets.token_hex(4))
    profile = WorkerProfile(identity, parts.fingerprint, parts.max_model_len, spec.token)

    def make_transport(memory: PoolMemory, serial: int = 0) -> KvTransport:
        return create_transport("nixl", memory, agent_name(identity, 0, serial))

    def make_engine(on_events: OnEvents) -> Engine[Command]:
        assert spec.role is not None
        engine = StampedEngine(stamps, spec.role)

        def hear(events: Sequence[Event]) -> None:
            engine.hear(events)
            on_events(events)

        stamped: Engine[Command] = engine.around(parts.make_engine(hear))  # type: ignore[assignment]
        return stamped

    if spec.role is Role.PREFILL:
        return PrefillWorker(
            profile=profile,
            make_engine=make_engine,
            transport=make_transport(parts.memory),
            directory=directory,
            config=PrefillWorkerConfig(),
        )
    return DecodeWorker(
        profile=profile,
        make_engine=make_engine,
        reader=StampedReader(LayoutReader(parts.memory, parts.fingerprint, make_transport), stamps),
        directory=directory,
        config=DecodeWorkerConfig(),
    )


def _make_blank_engine(on_events: OnEvents) -> Engine[Command]:
    scheduler = SchedulerConfig(
        num_blocks=NUM_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=ONE_CHUNK,
        enable_prefix_caching=False,
    )
    core = EngineCore(scheduler, BlankExecutor(), frozenset(), time.monotonic)
    return EngineThread(core, on_events, "blank-engine")


def _filled_pool(size: int) -> PoolMemory:
    """Every page is there."""
    array = np.full((NUM_BLOCKS, size), 7, dtype=np.uint8)
    return PoolMemory(array.ctypes.data, NUM_BLOCKS, size, owner=array)
