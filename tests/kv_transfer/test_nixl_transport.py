"""What is NIXL's own: peers that die, errors that are translated, and nothing that leaks."""

from __future__ import annotations

import base64
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from transport_kit import (
    Wire,
    block_content,
    blocks,
    content,
    filled_pool,
    finish,
    new_agent_name,
)

from kv_transfer import MemoryKind, PoolMemory
from kv_transfer.nixl import NixlLibrary, NixlTransport, load_library
from kv_transfer.nixl_agent import agent_config
from kv_transfer.nixl_metadata import NixlMetadata
from protocol.codec import endpoint_from_wire
from protocol.errors import StartupError, TransferFailed
from protocol.handoff import PoolDescription, TransportEndpoint
from protocol.ports import FetchStatus, KvTransport
from protocol.wire import splitserve_pb2 as pb

pytestmark = pytest.mark.nixl

NUM_BLOCKS = 8
BLOCK_BYTES = 4096
OWNER_SALT = 3


class Owner:
    """A process that owns blocks."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("nixl_owner.py")
        sizes = [str(number) for number in (NUM_BLOCKS, BLOCK_BYTES, OWNER_SALT)]
        self._process = subprocess.Popen(
            [sys.executable, str(script), new_agent_name(), *sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def endpoint(self) -> TransportEndpoint:
        """To be asked once: waits until the process is ready."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return endpoint_from_wire(pb.TransportEndpoint.FromString(base64.b64decode(line)))

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire("nixl")
    yield wire
    wire.close()


@pytest.fixture
def memory() -> PoolMemory:
    return filled_pool(NUM_BLOCKS, BLOCK_BYTES, salt=90)


@pytest.fixture
def reader(wire: Wire, memory: PoolMemory) -> KvTransport:
    return wire.attach(memory)


@pytest.fixture
def start_owner() -> Iterator[Callable[[], Owner]]:
    owners: list[Owner] = []

    def start() -> Owner:
        owners.append(Owner())
        return owners[-1]

    yield start
    for owner in owners:
        owner.kill()


def assert_reads_work(reader: KvTransport, memory: PoolMemory, agent: str) -> None:
    assert finish(reader.fetch(agent, blocks(5), blocks(1))) is FetchStatus.DONE
    assert content(memory)[1] == block_content(BLOCK_BYTES, OWNER_SALT, 5)


def test_blocks_are_read_from_another_process(
    reader: KvTransport, memory: PoolMemory, start_owner: Callable[[], Owner]
) -> None:
    endpoint = start_owner().endpoint
    reader.connect(endpoint)
    assert_reads_work(reader, memory, endpoint.agent)


def test_an_owner_that_is_dead_before_the_read_fails_it_and_others_go_on(
    reader: KvTransport, memory: PoolMemory, start_owner: Callable[[], Owner]
) -> None:
    victim, survivor = start_owner(), start_owner()
    theirs, others = victim.endpoint, survivor.endpoint
    reader.connect(theirs)
    reader.connect(others)
    assert_reads_work(reader, memory, theirs.agent)
    victim.kill()
    fates = {finish(reader.fetch(theirs.agent, blocks(2, 3), blocks(2, 3))) for _ in range(3)}
    assert fates == {FetchStatus.FAILED}
    reader.disconnect(theirs.agent)
    assert_reads_work(reader, memory, others.agent)


def test_an_owner_that_is_dead_before_the_connect_is_refused(
    reader: KvTransport, start_owner: Callable[[], Owner]
) -> None:
    owner = start_owner()
    endpoint = owner.endpoint
    owner.kill()
    with pytest.raises(TransferFailed, match=r"connect|read"):
        reader.connect(endpoint)
    with pytest.raises(TransferFailed):
        reader.fetch(endpoint.agent, blocks(1), blocks(1))


def test_reads_of_a_frozen_owner_are_pending_and_fail_when_it_is_killed(
    reader: KvTransport, start_owner: Callable[[], Owner]
) -> None:
    owner = start_owner()
    endpoint = owner.endpoint
    owner.freeze()
    reader.connect(endpoint)
    handles = [reader.fetch(endpoint.agent, blocks(i), blocks(i)) for i in range(1, 5)]
    assert {handle.poll() for handle in handles} == {FetchStatus.PENDING}
    owner.kill()
    assert {finish(handle) for handle in handles} == {FetchStatus.FAILED}
    reader.disconnect(endpoint.agent)


def test_reads_of_a_frozen_owner_end_well_when_it_goes_on(
    reader: KvTransport, memory: PoolMemory, start_owner: Callable[[], Owner]
) -> None:
    owner = start_owner()
    endpoint = owner.endpoint
    owner.freeze()
    reader.connect(endpoint)
    handle = reader.fetch(endpoint.agent, blocks(5), blocks(1))
    with pytest.raises(TransferFailed, match="pending"):
        reader.disconnect(endpoint.agent)
    owner.thaw()
    assert finish(handle) is FetchStatus.DONE
    assert content(memory)[1] == block_content(BLOCK_BYTES, OWNER_SALT, 5)


def test_a_thousand_reads_leave_nothing_behind(wire: Wire, reader: KvTransport, memory: PoolMemory) -> None:
    owner = wire.attach(filled_pool(NUM_BLOCKS, BLOCK_BYTES, OWNER_SALT))
    reader.connect(owner.endpoint)

    def read(times: int) -> int:
        for _ in range(times):
            finish(reader.fetch(owner.endpoint.agent, blocks(1, 2, 3), blocks(4, 5, 6)))
        return psutil.Process().memory_info().rss

    before = read(200)
    assert read(1000) - before < 1_000_000  # a leaked request has over 1 kB


def test_a_closed_agent_leaves_no_thread_and_no_open_file(wire: Wire) -> None:
    wire.attach(PoolMemory.allocate(2, 64)).close()  # what the first one opens stays for the process
    process = psutil.Process()
    before = process.num_threads(), process.num_fds()
    for _ in range(3):
        wire.attach(PoolMemory.allocate(2, 64)).close()
    assert (process.num_threads(), process.num_fds()) == before


def test_an_idle_agent_does_not_spin() -> None:
    """The stock agent of nixl 1.5 sets this to 0, which keeps a core busy for its progress thread."""
    config = agent_config(load_library().bindings, progress_interval_s=0.0)
    assert config.useProgThread
    assert config.pthrDelay >= 1


def test_every_error_of_the_library_becomes_a_failed_transfer() -> None:
    library = load_library()
    for kind in library.errors:
        with pytest.raises(TransferFailed, match=f"cannot juggle: {kind.__name__}: boom") as caught:
            raise_within(library, kind("boom"))
        assert isinstance(caught.value.__cause__, kind)


def test_the_librarys_own_errors_are_all_known() -> None:
    library = load_library()
    own = {name for name in dir(library.bindings) if name.endswith("Error")}
    assert len(own) > 10
    assert own <= {kind.__name__ for kind in library.errors}


def test_errors_that_are_not_the_librarys_pass_through() -> None:
    library = NixlLibrary(bindings=None, errors=(OSError,))
    with pytest.raises(ZeroDivisionError):
        raise_within(library, ZeroDivisionError())


def raise_within(library: NixlLibrary, error: Exception) -> None:
    with library.translated("juggle"):
        raise error


def test_a_blob_that_nixl_did_not_make_is_refused(reader: KvTransport) -> None:
    """With a good checksum, so that NIXL itself gets to see it."""
    for blob in (b"", b"junk", os.urandom(400)):
        metadata = NixlMetadata(4096, MemoryKind.HOST, 0, blob).to_bytes()
        pool = PoolDescription(NUM_BLOCKS, BLOCK_BYTES)
        with pytest.raises(TransferFailed):
            reader.connect(TransportEndpoint("nixl", new_agent_name(), pool, metadata))


def test_a_pool_beyond_what_the_peer_registered_is_refused(wire: Wire, reader: KvTransport) -> None:
    owner = wire.attach(filled_pool(NUM_BLOCKS, BLOCK_BYTES, OWNER_SALT)).endpoint
    too_long = PoolDescription(owner.pool.num_blocks + 1, BLOCK_BYTES)
    with pytest.raises(TransferFailed):
        reader.connect(TransportEndpoint("nixl", owner.agent, too_long, owner.metadata))
    reader.connect(owner)
    assert finish(reader.fetch(owner.agent, blocks(1), blocks(1))) is FetchStatus.DONE


def test_memory_that_cannot_be_registered_says_what_to_look_at() -> None:
    memory = PoolMemory.allocate(2, 4096)
    as_device = PoolMemory(memory.address, 2, 4096, MemoryKind.DEVICE)
    with pytest.raises(StartupError, match="UCX_TLS"):
        NixlTransport(as_device, new_agent_name())


def test_nixl_neither_prints_nor_changes_how_the_process_logs() -> None:
    program = (
        "import logging, sys\n"
        "sys.modules['torch'] = None\n"  # NIXL looks for it, and it takes seconds
        "from kv_transfer import PoolMemory, create_transport\n"
        "create_transport('nixl', PoolMemory.allocate(2, 64), 'quiet').close()\n"
        "assert logging.raiseExceptions\n"
        "assert not logging.getLogger('nixl').handlers\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("", "")
    assert not logging.getLogger("nixl").handlers
