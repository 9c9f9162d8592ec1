"""A cluster in one process: its end, and its public port."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from tiny_clusters import tiny_config, tiny_model

from cluster.compose import open_model
from cluster.engine_parts import build_engine
from cluster.local import LocalCluster
from protocol.errors import EngineFault, StartupError


class Part:
    """Something that can be stopped, or cannot."""

    def __init__(self, name: str, stopped: list[str], error: Exception | None = None) -> None:
        self._name = name
        self._stopped = stopped
        self._error = error

    async def stop(self) -> None:
        self._stopped.append(self._name)
        if self._error is not None:
            raise self._error


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


async def test_part_that_cannot_be_stopped_keeps_no_other_from_its_end(model: Path) -> None:
    cluster: Any = LocalCluster(tiny_config(model, kv_transfer__transport="loopback"))
    stopped: list[str] = []
    await cluster.stop()  # never started: gives back what the construction took
    cluster.router = Part("router", stopped, TimeoutError("hangs"))
    cluster.decode_workers = [Part("d0", stopped, EngineFault("hangs")), Part("d1", stopped)]
    cluster.prefill_workers = [Part("p0", stopped)]
    with pytest.raises((TimeoutError, EngineFault)):
        await cluster.stop()
    assert stopped == ["router", "d0", "d1", "p0"]


def test_bounds_of_a_pool_reach_its_scheduler(model: Path) -> None:
    config = tiny_config(model, decode__max_num_prefill_tokens=48)
    engines = [build_engine(config, pool, open_model(config)) for pool in (config.prefill, config.decode)]
    assert [engine.scheduler.max_num_prefill_tokens for engine in engines] == [None, 48]


async def test_port_that_another_program_shares_is_refused(model: Path) -> None:
    """The kernel would give it every second connection."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        cluster = LocalCluster(tiny_config(model, kv_transfer__transport="loopback", http__port=port))
        with pytest.raises(StartupError, match=f"port {port} on 127.0.0.1 is taken"):
            async with cluster.http():
                pass
        await cluster.stop()
