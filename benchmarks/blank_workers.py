"""Workers that compute nothing, in pools of a real model's size: what is left is the hand-off.

Everything else is as in any cluster: engine, scheduler, leases, gRPC, NIXL. A step takes no time, and
samples the same token always. `build_demo` and `build_llama_8b` are for `ProcessCluster(build=...)`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from block_shapes import SHAPES, block_bytes

from cluster.process_main import Worker
from cluster.process_spec import ProcessSpec
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


class BlankExecutor:
    """Samples where a slice is due; touches no KV."""

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult([TOKEN if piece.samples else None for piece in plan.slices])


def build_demo(spec: ProcessSpec, directory: Directory) -> Worker:
    return _build(spec, directory, SHAPES["demo"])


def build_llama_8b(spec: ProcessSpec, directory: Directory) -> Worker:
    return _build(spec, directory, SHAPES["llama_8b"])


def _build(spec: ProcessSpec, directory: Directory, shape: Fingerprint) -> Worker:
    identity = WorkerIdentity(WorkerId(spec.name), secrets.token_hex(4))
    fingerprint = replace(shape, model=spec.cluster_config().model_name)
    profile = WorkerProfile(identity, fingerprint, MAX_MODEL_LEN, spec.token)
    memory = _filled_pool(block_bytes(shape))

    def make_transport(memory: PoolMemory, serial: int = 0) -> KvTransport:
        return create_transport("nixl", memory, agent_name(identity, 0, serial))

    if spec.role is Role.PREFILL:
        return PrefillWorker(
            profile=profile,
            make_engine=_make_engine,
            transport=make_transport(memory),
            directory=directory,
            config=PrefillWorkerConfig(),
        )
    return DecodeWorker(
        profile=profile,
        make_engine=_make_engine,
        reader=LayoutReader(memory, fingerprint, make_transport),
        directory=directory,
        config=DecodeWorkerConfig(),
    )


def _make_engine(on_events: Callable[[Sequence[Event]], None]) -> Engine[Command]:
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
