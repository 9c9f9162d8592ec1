"""A transport by name, or a message that says what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kv_transfer import LoopbackNetwork, PoolMemory, agent_name, create_transport
from protocol.errors import StartupError
from protocol.ids import WorkerId, WorkerIdentity


@pytest.fixture
def memory() -> PoolMemory:
    return PoolMemory.allocate(num_blocks=2, block_bytes=8)


def test_loopback_is_built_without_nixl(memory: PoolMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    transport = create_transport("loopback", memory, "a", network=LoopbackNetwork())
    assert transport.endpoint.transport == "loopback"
    transport.close()


def test_a_missing_nixl_says_how_to_go_on(memory: PoolMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(StartupError, match=r"pip install nixl.*transport: loopback"):
        create_transport("nixl", memory, "a")


def test_loopback_without_a_network_says_what_to_set(memory: PoolMemory) -> None:
    with pytest.raises(StartupError, match="transport: nixl"):
        create_transport("loopback", memory, "a")


def test_an_unknown_transport_names_the_known_ones(memory: PoolMemory) -> None:
    with pytest.raises(StartupError, match="nixl, gloo, nccl or loopback"):
        create_transport("pigeon", memory, "a")


def test_torch_is_loaded_for_the_transports_that_need_it_alone() -> None:
    program = (
        "import sys\n"
        "from kv_transfer import LoopbackNetwork, PoolMemory, create_transport\n"
        "create_transport('loopback', PoolMemory.allocate(2, 8), 'a', network=LoopbackNetwork()).close()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_agent_names_differ_by_worker_incarnation_rank_and_serial() -> None:
    first = WorkerIdentity(WorkerId("w"), "i1")
    second = WorkerIdentity(WorkerId("w"), "i2")
    names = {agent_name(first, 0), agent_name(first, 1), agent_name(first, 0, 1), agent_name(second, 0)}
    assert len(names) == 4
