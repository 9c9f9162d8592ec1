"""The end of a worker: whatever hangs or fails, the transport is closed and nothing stays announced."""

from __future__ import annotations

import pytest
from worker_fakes import CLUSTER_TOKEN, D0, FINGERPRINT, P0, MemoryDirectory, ScriptedEngine

from decode_worker import DecodeWorker, DecodeWorkerConfig
from kv_transfer import LayoutReader, LoopbackNetwork, LoopbackTransport, PoolMemory
from prefill_worker import PrefillWorker, PrefillWorkerConfig
from protocol.errors import EngineFault, StartupError
from protocol.ids import Role
from rpc import WorkerProfile


class HangingEngine(ScriptedEngine):
    def stop(self, timeout_s: float) -> None:
        raise EngineFault("its step hangs")


class Bench:
    """One worker of a role, and whether others could still read from it."""

    def __init__(
        self,
        role: Role,
        engine: type[ScriptedEngine] = ScriptedEngine,
        directory: MemoryDirectory | None = None,
    ) -> None:
        self.directory = directory or MemoryDirectory()
        self._network = LoopbackNetwork()
        memory = PoolMemory.allocate(4, 64)
        transport = LoopbackTransport(memory, "agent", self._network)
        identity = P0 if role is Role.PREFILL else D0
        profile = WorkerProfile(identity, FINGERPRINT, 100, CLUSTER_TOKEN)
        self.worker: PrefillWorker | DecodeWorker
        if role is Role.PREFILL:
            self.worker = PrefillWorker(
                profile=profile,
                make_engine=engine,
                transport=transport,
                directory=self.directory,
                config=PrefillWorkerConfig(),
            )
        else:
            self.worker = DecodeWorker(
                profile=profile,
                make_engine=engine,
                reader=LayoutReader(memory, FINGERPRINT, lambda memory, serial: transport),
                directory=self.directory,
                config=DecodeWorkerConfig(),
            )

    @property
    def is_closed(self) -> bool:
        return self._network.pool("agent") is None


@pytest.mark.parametrize("role", list(Role))
async def test_transport_is_closed_though_the_engine_hangs(role: Role) -> None:
    bench = Bench(role, HangingEngine)
    await bench.worker.start("127.0.0.1", 0)
    with pytest.raises(EngineFault, match="hangs"):
        await bench.worker.stop()
    assert bench.is_closed
    assert bench.directory.records == {}
    await bench.worker.stop()


@pytest.mark.parametrize("role", list(Role))
async def test_worker_that_never_started_gives_its_transport_back(role: Role) -> None:
    bench = Bench(role)
    await bench.worker.stop()
    assert bench.is_closed
    await bench.worker.stop()


@pytest.mark.parametrize("role", list(Role))
async def test_worker_whose_start_failed_gives_its_transport_back(role: Role) -> None:
    bench = Bench(role)
    with pytest.raises(StartupError):
        await bench.worker.start("0.0.0.0", 0)  # noqa: S104
    await bench.worker.stop()
    assert bench.is_closed


@pytest.mark.parametrize("role", list(Role))
async def test_directory_that_breaks_does_not_keep_a_worker_from_its_end(role: Role) -> None:
    class BrokenDirectory(MemoryDirectory):
        async def withdraw(self, identity: object) -> None:
            raise ZeroDivisionError

    bench = Bench(role, directory=BrokenDirectory())
    await bench.worker.start("127.0.0.1", 0)
    with pytest.raises(ZeroDivisionError):
        await bench.worker.stop()
    assert bench.is_closed
