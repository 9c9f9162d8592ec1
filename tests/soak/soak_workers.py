"""The workers of a soak: real ones that can be told, by signals, to let something go wrong.

`build`, `build_late` and `build_blind` are for `ProcessCluster(build=...)`:

- `build`: nothing goes wrong but what is asked for.
- `build_late`: reads are late and renewals are lost, all the time, so that leases lapse under the readers.
- `build_blind`: as `build_late`, and decode workers take every verdict on a release for VALID. It is the
  test hook that switches validation off: a soak over it must fail.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import grpc

from cluster import compose
from cluster.engine_parts import EngineParts, build_engine
from cluster.process_main import Worker
from cluster.process_spec import ProcessSpec
from cluster.ranks import RankLauncher
from decode_worker import DecodeWorker, DecodeWorkerConfig
from kv_transfer import (
    FaultKind,
    FaultyTransport,
    LayoutReader,
    PoolMemory,
    ReadFaults,
    agent_name,
    block_checksums,
    create_transport,
)
from prefill_worker import PrefillWorker, PrefillWorkerConfig
from protocol.faults import FaultPlan
from protocol.ids import Role, WorkerId, WorkerIdentity
from protocol.ports import Directory, KvTransport
from protocol.wire import splitserve_pb2 as pb
from rpc import CallFaultKind, CallFaults, Dial, FaultyDial, WorkerProfile, open_channel

FAIL_READ = signal.SIGUSR2
LOSE_RENEWAL = signal.SIGRTMIN
LOSE_VERDICT = signal.SIGRTMIN + 1
READ_FAULTS = (FaultKind.FAIL, FaultKind.REFUSE, FaultKind.DISCONNECT, FaultKind.DELAY)
SILENT_READ_FAULTS = (FaultKind.BIT_FLIP, FaultKind.TRUNCATE)
"""Only with checksums."""
READ_DELAY_S = 1.0


@dataclass(frozen=True, slots=True)
class Trouble:
    """What goes wrong without being asked for."""

    reads: Mapping[FaultKind, float] = field(default_factory=dict)
    max_read_delay_s: float = READ_DELAY_S
    calls: Mapping[str, Mapping[CallFaultKind, float]] = field(default_factory=dict)


LATE = Trouble({FaultKind.DELAY: 0.9}, 2.5, {"Renew": {CallFaultKind.DROP: 0.5}})


def build(spec: ProcessSpec, directory: Directory, _: RankLauncher) -> Worker:
    return _build(spec, directory, Trouble(), open_channel)


def build_late(spec: ProcessSpec, directory: Directory, _: RankLauncher) -> Worker:
    return _build(spec, directory, LATE, open_channel)


def build_blind(spec: ProcessSpec, directory: Directory, _: RankLauncher) -> Worker:
    return _build(spec, directory, LATE, lambda address, token: BlindChannel(open_channel(address, token)))


def _build(spec: ProcessSpec, directory: Directory, trouble: Trouble, dial: Dial) -> Worker:
    config = spec.cluster_config()
    identity = WorkerIdentity(WorkerId(spec.name), secrets.token_hex(4))
    parts = build_engine(config, config.pool(spec.role or Role.DECODE), compose.open_model(config))
    profile = WorkerProfile(identity, parts.fingerprint, parts.scheduler.max_model_len, spec.token)
    if spec.role is Role.PREFILL:
        return PrefillWorker(
            profile=profile,
            make_engine=partial(parts.make_thread, "prefill-engine"),
            transport=create_transport("nixl", parts.pool_memory, agent_name(identity, 0)),
            directory=directory,
            config=PrefillWorkerConfig(lease_s=config.kv_transfer.lease_s),
            checksum=partial(block_checksums, parts.pool_memory) if config.kv_transfer.checksum else None,
        )
    return _decode_worker(spec, directory, trouble, dial, profile=profile, parts=parts)


def _decode_worker(
    spec: ProcessSpec,
    directory: Directory,
    trouble: Trouble,
    dial: Dial,
    *,
    profile: WorkerProfile,
    parts: EngineParts,
) -> DecodeWorker:
    config = spec.cluster_config()
    faults = ReadFaults(trouble.reads, seed=spec.name, max_delay_s=trouble.max_read_delay_s)
    reads, faulty_dial = faults.plan(spec.name), FaultyDial(CallFaults(trouble.calls), spec.name, dial)
    _obey(reads, faulty_dial, has_checksums=config.kv_transfer.checksum)

    def make_transport(memory: PoolMemory, serial: int = 0) -> KvTransport:
        transport = create_transport("nixl", memory, agent_name(profile.identity, 0, serial))
        return FaultyTransport(transport, memory, reads)

    checksum = block_checksums if config.kv_transfer.checksum else None
    return DecodeWorker(
        profile=profile,
        make_engine=partial(parts.make_thread, "decode-engine"),
        reader=LayoutReader(parts.pool_memory, parts.fingerprint, make_transport, checksum=checksum),
        directory=directory,
        config=DecodeWorkerConfig(),
        dial=faulty_dial,
    )


def _obey(reads: FaultPlan[FaultKind], dial: FaultyDial, *, has_checksums: bool) -> None:
    """Script the next read, renewal or verdict on a signal."""
    kinds = cycle(READ_FAULTS + SILENT_READ_FAULTS if has_checksums else READ_FAULTS)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(FAIL_READ, lambda: reads.script(next(kinds), READ_DELAY_S))
    loop.add_signal_handler(LOSE_RENEWAL, dial.plans["Renew"].script, CallFaultKind.DROP)
    loop.add_signal_handler(LOSE_VERDICT, dial.plans["Release"].script, CallFaultKind.LOSE_REPLY)


class BlindChannel(grpc.aio.Channel):
    """Another channel, which it owns; whatever is answered to a Release, it says VALID."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        call = self._channel.unary_unary(method, *args, **options)
        return _always_valid(call) if method.endswith("/Release") else call

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return self._channel.unary_stream(*args, **options)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return self._channel.stream_unary(*args, **options)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return self._channel.stream_stream(*args, **options)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> BlindChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _always_valid(call: Callable[..., Any]) -> Callable[..., Any]:
    async def release(request: pb.ReleaseRequest, *, timeout: float | None = None) -> pb.ReleaseReply:
        reply: pb.ReleaseReply = await call(request, timeout=timeout)
        return pb.ReleaseReply(verdict="valid", checksums=reply.checksums)

    return release
