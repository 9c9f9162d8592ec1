"""What is the torch.distributed transport's own: owners and readers that die, freeze or are strangers."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import psutil
import pytest
from pair_owner_kit import OwnerProcess, forks
from transport_kit import (
    WAIT_LIMIT_S,
    Wire,
    all_finish,
    block_content,
    blocks,
    content,
    filled_pool,
    finish,
    new_agent_name,
)

from kv_transfer import MemoryKind, PoolMemory, create_transport
from kv_transfer.pairs.channel import Channel, greet_owner
from kv_transfer.pairs.choose import GLOO, make_fabric
from kv_transfer.pairs.group import READER
from kv_transfer.pairs.messages import Shape
from kv_transfer.pairs.metadata import PairMetadata
from kv_transfer.pairs.wishes import blocks_to_bytes, shape_to_bytes
from protocol.errors import StartupError, TransferFailed
from protocol.handoff import TransportEndpoint
from protocol.ports import FetchStatus, KvTransport

NUM_BLOCKS = 8
BLOCK_BYTES = 2**16
"""Long enough to go by itself."""
SALT = 3


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire("gloo")
    yield wire
    wire.close()


@pytest.fixture
def memory() -> PoolMemory:
    return filled_pool(NUM_BLOCKS, BLOCK_BYTES, salt=90)


@pytest.fixture
def reader(wire: Wire, memory: PoolMemory) -> KvTransport:
    return wire.attach(memory)


@pytest.fixture
def start_owner() -> Iterator[Callable[..., OwnerProcess]]:
    owners: list[OwnerProcess] = []
    context = forks()

    def start(num_messages: int | None = None) -> OwnerProcess:
        owners.append(OwnerProcess(context, NUM_BLOCKS, BLOCK_BYTES, SALT, num_messages=num_messages))
        return owners[-1]

    yield start
    for owner in owners:
        owner.kill()


def owner_here(wire: Wire) -> TransportEndpoint:
    return wire.attach(filled_pool(NUM_BLOCKS, BLOCK_BYTES, SALT)).endpoint


def assert_readable(reader: KvTransport, memory: PoolMemory, agent: str) -> None:
    assert finish(reader.fetch(agent, blocks(5), blocks(1))) is FetchStatus.DONE
    assert bytes(memory.block_view(blocks(1)[0])) == block_content(BLOCK_BYTES, SALT, 5)


def try_to_read(reader: KvTransport, agent: str) -> FetchStatus:
    """Whether the link is lost may be known before the read, or after."""
    try:
        return finish(reader.fetch(agent, blocks(1), blocks(1)))
    except TransferFailed:
        return FetchStatus.FAILED


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + WAIT_LIMIT_S
    while not condition():
        assert time.monotonic() < until_s, what
        time.sleep(0.001)


def test_an_owner_that_dies_in_the_middle_of_a_read_fails_it_and_others_go_on(
    reader: KvTransport, memory: PoolMemory, start_owner: Callable[..., OwnerProcess], wire: Wire
) -> None:
    victim, survivor = start_owner(num_messages=2), owner_here(wire)
    reader.connect(victim.endpoint)
    reader.connect(survivor)
    handle = reader.fetch(victim.agent, blocks(2, 3, 4, 5), blocks(2, 3, 4, 5))
    wait_until(lambda: victim.is_frozen, "the owner sent all")
    assert_readable(reader, memory, survivor.agent)
    assert handle.poll() is FetchStatus.PENDING
    victim.kill()
    assert finish(handle) is FetchStatus.FAILED
    after = content(memory)
    arrived = [after[i] == block_content(BLOCK_BYTES, SALT, i) for i in (2, 3, 4, 5)]
    assert arrived == [True, True, False, False]
    with pytest.raises(TransferFailed, match="no connection"):
        reader.fetch(victim.agent, blocks(1), blocks(1))
    reader.disconnect(victim.agent)
    assert_readable(reader, memory, survivor.agent)


def test_a_frozen_owner_keeps_only_its_own_readers_waiting(
    reader: KvTransport, memory: PoolMemory, start_owner: Callable[..., OwnerProcess], wire: Wire
) -> None:
    frozen, awake = start_owner(), owner_here(wire)
    frozen.freeze()
    reader.connect(frozen.endpoint)
    reader.connect(awake)
    handles = [reader.fetch(frozen.agent, blocks(i), blocks(i)) for i in (2, 3)]
    assert_readable(reader, memory, awake.agent)
    assert {handle.poll() for handle in handles} == {FetchStatus.PENDING}
    with pytest.raises(TransferFailed, match="pending"):
        reader.disconnect(frozen.agent)
    frozen.thaw()
    assert all_finish(handles) == {FetchStatus.DONE}
    assert content(memory)[2] == block_content(BLOCK_BYTES, SALT, 2)


def test_reads_of_a_frozen_owner_fail_when_it_is_killed(
    reader: KvTransport, start_owner: Callable[..., OwnerProcess]
) -> None:
    owner = start_owner()
    reader.connect(owner.endpoint)
    assert finish(reader.fetch(owner.agent, blocks(1), blocks(1))) is FetchStatus.DONE
    owner.freeze()
    handles = [reader.fetch(owner.agent, blocks(i), blocks(i)) for i in (2, 3)]
    owner.kill()
    assert all_finish(handles) == {FetchStatus.FAILED}


def test_an_owner_that_is_dead_before_the_connect_fails_the_reads(
    reader: KvTransport, start_owner: Callable[..., OwnerProcess]
) -> None:
    owner = start_owner()
    owner.kill()
    reader.connect(owner.endpoint)
    assert try_to_read(reader, owner.agent) is FetchStatus.FAILED
    with pytest.raises(TransferFailed, match="nobody answers"):
        reader.fetch(owner.agent, blocks(1), blocks(1))


def test_a_reader_with_a_wrong_secret_is_turned_away(
    wire: Wire, reader: KvTransport, memory: PoolMemory, caplog: pytest.LogCaptureFixture
) -> None:
    owner = owner_here(wire)
    true = PairMetadata.from_bytes(owner.metadata)
    wrong = replace(true, secret=bytes(len(true.secret)))
    before = content(memory)
    with caplog.at_level(logging.DEBUG):
        reader.connect(replace(owner, metadata=wrong.to_bytes()))
        assert try_to_read(reader, owner.agent) is FetchStatus.FAILED
        wait_until(lambda: "turned away" in caplog.text, "the owner said nothing")
    assert content(memory) == before
    assert true.secret.hex() not in caplog.text
    assert repr(true.secret) not in caplog.text + repr(true)
    reader.disconnect(owner.agent)
    reader.connect(owner)
    assert_readable(reader, memory, owner.agent)


def test_another_process_that_listens_where_the_owner_did_is_no_owner(
    reader: KvTransport, memory: PoolMemory, wire: Wire
) -> None:
    """A port may be given to somebody else as soon as a process has died."""
    old, new = owner_here(wire), owner_here(wire)
    port = PairMetadata.from_bytes(new.metadata).port
    moved = replace(PairMetadata.from_bytes(old.metadata), port=port)
    before = content(memory)
    reader.connect(replace(old, metadata=moved.to_bytes()))
    assert try_to_read(reader, old.agent) is FetchStatus.FAILED
    assert content(memory) == before


def test_strangers_at_the_door_keep_nobody_out(reader: KvTransport, memory: PoolMemory, wire: Wire) -> None:
    owner = owner_here(wire)
    place = PairMetadata.from_bytes(owner.metadata)
    with socket.create_connection((place.host, place.port)) as silent:
        with socket.create_connection((place.host, place.port)) as rude:
            rude.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\xff" * 4096)
            reader.connect(owner)
            assert_readable(reader, memory, owner.agent)
        silent.sendall(b"\x01")
        assert_readable(reader, memory, owner.agent)


def test_an_owner_sends_nothing_from_beyond_its_pool(wire: Wire) -> None:
    """Whoever asks knows the secret, and still gets blocks alone."""
    owner = owner_here(wire)
    place = PairMetadata.from_bytes(owner.metadata)
    for shape in (
        Shape(BLOCK_BYTES, ((0, BLOCK_BYTES + 1),)),
        Shape(BLOCK_BYTES, ((2**63, 2**63),)),
        Shape(2 * BLOCK_BYTES, ((0, BLOCK_BYTES),)),
    ):
        channel = Channel.open(place.host, place.port)
        greet_owner(channel, place.secret, shape_to_bytes(shape))
        with pytest.raises(TransferFailed, match=r"hung up|lost"):
            channel.recv(WAIT_LIMIT_S)
        channel.close()


class BareReader:
    """Lets itself in as a reader does, and then does as the test says."""

    def __init__(self, owner: TransportEndpoint) -> None:
        place = PairMetadata.from_bytes(owner.metadata)
        self.channel = Channel.open(place.host, place.port)
        whole = Shape(BLOCK_BYTES, ((0, BLOCK_BYTES),))
        greet_owner(self.channel, place.secret, shape_to_bytes(whole))
        self._pair = make_fabric(GLOO, filled_pool(2, 64, 1), place.host).pair(self.channel, READER)

    def ask(self, *numbers: int) -> None:
        self.channel.send(blocks_to_bytes(blocks(*numbers)))

    def leave(self) -> None:
        self._pair.abort()
        self.channel.close()


@pytest.mark.parametrize("wrong", [0, NUM_BLOCKS, 2**31])
def test_blocks_beyond_the_pool_are_refused_by_the_owner_too(wrong: int, wire: Wire) -> None:
    reader = BareReader(owner_here(wire))
    reader.ask(1, wrong)
    with pytest.raises(TransferFailed, match=r"hung up|lost"):
        reader.channel.recv(WAIT_LIMIT_S)
    reader.leave()


def test_a_reader_that_takes_nothing_of_what_it_asked_for_holds_up_no_other(
    reader: KvTransport, memory: PoolMemory, wire: Wire
) -> None:
    """Nor the owner's end."""
    owner = wire.attach(filled_pool(NUM_BLOCKS, BLOCK_BYTES, SALT))
    idle, gone = BareReader(owner.endpoint), BareReader(owner.endpoint)
    for one in (idle, gone):
        one.ask(*range(1, NUM_BLOCKS))
    gone.leave()
    reader.connect(owner.endpoint)
    assert_readable(reader, memory, owner.endpoint.agent)
    owner.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kv pair owner"]
    idle.leave()


def test_many_readers_read_from_one_owner_at_once(wire: Wire) -> None:
    owner = owner_here(wire)
    memories = [filled_pool(NUM_BLOCKS, BLOCK_BYTES, salt=90) for _ in range(8)]
    readers = [wire.attach(memory) for memory in memories]
    for reader in readers:
        reader.connect(owner)
    order = blocks(*range(1, NUM_BLOCKS))
    handles = [reader.fetch(owner.agent, order, order[::-1]) for reader in readers for _ in range(3)]
    assert all_finish(handles) == {FetchStatus.DONE}
    expected = [block_content(BLOCK_BYTES, SALT, i) for i in reversed(order)]
    assert all(content(memory)[1:] == expected for memory in memories)


def test_an_owner_that_closes_fails_the_reads_of_those_who_are_connected(
    wire: Wire, reader: KvTransport, memory: PoolMemory
) -> None:
    owner = wire.attach(filled_pool(NUM_BLOCKS, BLOCK_BYTES, SALT))
    reader.connect(owner.endpoint)
    assert_readable(reader, memory, owner.endpoint.agent)
    owner.close()
    before = content(memory)
    assert try_to_read(reader, owner.endpoint.agent) is FetchStatus.FAILED
    assert content(memory) == before


def test_closed_transports_leave_no_thread_and_no_open_file(wire: Wire) -> None:
    process = psutil.Process()

    def a_pair_of_them(*, is_read: bool) -> None:
        owner, reader = (wire.attach(filled_pool(4, 64, salt)) for salt in (1, 2))
        reader.connect(owner.endpoint)
        if is_read:
            finish(reader.fetch(owner.endpoint.agent, blocks(1), blocks(2)))
        reader.close()
        owner.close()

    a_pair_of_them(is_read=True)  # what the first one opens stays for the process
    before = process.num_threads(), process.num_fds()
    for is_read in (True, False, True, False):
        a_pair_of_them(is_read=is_read)
    wait_until(lambda: (process.num_threads(), process.num_fds()) == before, "something is left")


def test_device_memory_does_not_go_by_gloo() -> None:
    with pytest.raises(StartupError, match="nixl, or to nccl"):
        create_transport("gloo", PoolMemory(4096, 2, 8, MemoryKind.DEVICE), new_agent_name())


def test_host_memory_does_not_go_by_nccl() -> None:
    with pytest.raises(StartupError, match=r"nixl, or to gloo.*num_gpus"):
        create_transport("nccl", PoolMemory.allocate(2, 8), new_agent_name())


def test_a_torch_without_nccl_says_what_to_install() -> None:
    from torch.distributed import distributed_c10d

    if hasattr(distributed_c10d, "ProcessGroupNCCL"):
        pytest.skip("this torch has NCCL")
    with pytest.raises(StartupError, match="CUDA build of torch"):
        create_transport("nccl", PoolMemory(4096, 2, 8, MemoryKind.DEVICE), new_agent_name())


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host"])
def test_an_address_that_is_not_this_machines_is_refused(host: str) -> None:
    with pytest.raises(StartupError, match=host):
        create_transport("gloo", PoolMemory.allocate(2, 8), new_agent_name(), host=host)
