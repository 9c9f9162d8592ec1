"""Each rank of a reader gets its part of the KV, however many ranks the owner has."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rank_kit import NUM_BLOCKS, TORCH, UNTOUCHED, Owner, RankPools, Reader, fingerprint_of, random_kv
from transport_kit import Wire, all_finish, blocks, finish, new_agent_name

from kv_transfer import FaultKind, FaultyTransport, LayoutReader, PoolMemory, block_checksums
from protocol.codec import endpoint_from_wire
from protocol.errors import LayoutMismatch, StartupError, TransferFailed
from protocol.faults import FaultPlan
from protocol.ports import FetchStatus, KvTransport
from protocol.rank_layout import RankLayout
from protocol.wire import splitserve_pb2 as pb

THEIR_TABLE, MY_TABLE = blocks(3, 11, 1), blocks(9, 2, 5)

LAYOUTS = [
    pytest.param(8, RankLayout(1), RankLayout(2), id="1-2"),
    pytest.param(8, RankLayout(2), RankLayout(1), id="2-1"),
    pytest.param(8, RankLayout(2), RankLayout(4), id="2-4"),
    pytest.param(8, RankLayout(4), RankLayout(2), id="4-2"),
    pytest.param(8, RankLayout(2), RankLayout(2), id="2-2"),
    pytest.param(2, RankLayout(4), RankLayout(2), id="replicated-4-2"),
    pytest.param(2, RankLayout(1), RankLayout(4), id="replicated-1-4"),
    pytest.param(3, RankLayout(3), RankLayout(2), id="uneven-3-2"),
    pytest.param(4, RankLayout(1, 2), RankLayout(1), id="2-stages-1"),
    pytest.param(4, RankLayout(1), RankLayout(1, 2), id="1-2-stages"),
    pytest.param(4, RankLayout(2, 3), RankLayout(3, 2), id="2x3-3x2"),
]


@pytest.fixture(params=["loopback", pytest.param("nixl", marks=pytest.mark.nixl)])
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    wire = Wire(request.param)
    yield wire
    wire.close()


@pytest.fixture
def loopback() -> Iterator[Wire]:
    wire = Wire("loopback")
    yield wire
    wire.close()


@pytest.mark.parametrize(("num_kv_heads", "theirs", "mine"), LAYOUTS)
def test_every_rank_gets_its_heads_and_layers_bit_by_bit(
    wire: Wire, num_kv_heads: int, theirs: RankLayout, mine: RankLayout
) -> None:
    owner = Owner(wire, fingerprint_of(theirs, num_kv_heads))
    reader = Reader(wire, fingerprint_of(mine, num_kv_heads))
    reader.connect(owner)
    reads = [
        rank.fetch_tokens(owner.endpoint.agent, THEIR_TABLE, MY_TABLE, range(12)) for rank in reader.ranks
    ]
    assert all_finish(reads) == {FetchStatus.DONE}
    for rank, part in enumerate(reader.pools.parts):
        assert reads[rank].num_bytes == 3 * reader.pools.memories[rank].block_bytes
        assert torch.equal(reader.pools.tokens(rank, MY_TABLE), owner.part(part, THEIR_TABLE))
        others = [block for block in range(NUM_BLOCKS) if block not in MY_TABLE]
        assert (reader.pools.tensors[rank][others] == UNTOUCHED).all()
    reader.close()


@pytest.mark.parametrize("theirs", [(12, "float32"), (3, "bfloat16"), (4, "bfloat16")], ids=str)
@pytest.mark.parametrize(("num_kv_heads", "their_ranks", "my_ranks"), LAYOUTS)
def test_ranks_and_blocks_may_differ_at_once(
    loopback: Wire,
    num_kv_heads: int,
    their_ranks: RankLayout,
    my_ranks: RankLayout,
    theirs: tuple[int, str],
) -> None:
    owner = Owner(loopback, fingerprint_of(their_ranks, num_kv_heads, *theirs))
    reader = Reader(loopback, fingerprint_of(my_ranks, num_kv_heads, block_size=4))
    reader.connect(owner)
    their_table, my_table = blocks(3, 11, 1, 7)[: -(-12 // theirs[0])], blocks(9, 2, 5)
    for rank, part in enumerate(reader.pools.parts):
        read = reader.ranks[rank].fetch_tokens(owner.endpoint.agent, their_table, my_table, range(12))
        assert finish(read) is FetchStatus.DONE
        expected = owner.part(part, their_table)[..., :12, :].to(TORCH["float32"])
        assert torch.equal(reader.pools.tokens(rank, my_table), expected)
    reader.close()


class Scene:
    """An owner of two ranks, and a reader of one, whose reads go wrong as scripted."""

    def __init__(self) -> None:
        self.plan: FaultPlan[FaultKind] = FaultPlan()
        plain = Wire("loopback")
        self.wire = Wire("loopback", lambda inner, memory: FaultyTransport(inner, memory, self.plan))
        self.wire.network = plain.network
        self.owner = Owner(plain, fingerprint_of(RankLayout(2), 4))
        self.reader = Reader(self.wire, fingerprint_of(RankLayout(1), 4))
        self.rank = self.reader.ranks[0]
        self.agent = self.owner.endpoint.agent

    def connect(self) -> None:
        self.reader.connect(self.owner)

    def reader_transport(self, memory: PoolMemory, serial: int) -> KvTransport:
        return self.wire.attach(memory)

    def fetch_status(self) -> FetchStatus:
        return finish(self.rank.fetch_tokens(self.agent, THEIR_TABLE, MY_TABLE, range(12)))


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.reader.close()


def test_a_read_is_pending_until_all_ranks_have_been_read(scene: Scene) -> None:
    scene.connect()
    scene.plan.script(None)
    scene.plan.script(FaultKind.STALL)
    read = scene.rank.fetch_tokens(scene.agent, THEIR_TABLE, MY_TABLE, range(12))
    assert [read.poll() for _ in range(3)] == [FetchStatus.PENDING] * 3
    with pytest.raises(TransferFailed, match="pending"):
        read.release()
    with pytest.raises(TransferFailed, match="pending"):
        scene.rank.disconnect(scene.agent)
    scene.plan.resume()
    assert finish(read) is FetchStatus.DONE


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_fails_the_read_once_the_other_one_is_over(scene: Scene, failing: int) -> None:
    scene.connect()
    faults = [FaultKind.STALL, FaultKind.STALL]
    faults[failing] = FaultKind.FAIL
    for fault in faults:
        scene.plan.script(fault)
    read = scene.rank.fetch_tokens(scene.agent, THEIR_TABLE, MY_TABLE, range(12))
    assert read.poll() is FetchStatus.PENDING
    scene.plan.resume()
    assert finish(read) is FetchStatus.FAILED
    assert read.poll() is FetchStatus.FAILED
    assert scene.fetch_status() is FetchStatus.DONE


def test_a_read_that_its_first_rank_refuses_touches_nothing(scene: Scene) -> None:
    scene.connect()
    scene.plan.script(FaultKind.REFUSE)
    with pytest.raises(TransferFailed, match="cannot be started"):
        scene.fetch_status()
    assert (scene.reader.pools.tensors[0] == UNTOUCHED).all()
    assert scene.fetch_status() is FetchStatus.DONE


def test_a_read_that_a_later_rank_refuses_fails_when_the_earlier_one_is_over(scene: Scene) -> None:
    """It is under way by then, and nobody may use its blocks before it ends."""
    scene.connect()
    scene.plan.script(FaultKind.STALL)
    scene.plan.script(FaultKind.REFUSE)
    read = scene.rank.fetch_tokens(scene.agent, THEIR_TABLE, MY_TABLE, range(12))
    assert read.poll() is FetchStatus.PENDING
    scene.plan.resume()
    assert finish(read) is FetchStatus.FAILED


def test_all_ranks_of_an_owner_are_disconnected_and_connected_again(scene: Scene) -> None:
    scene.connect()
    scene.rank.disconnect(scene.agent)
    scene.rank.disconnect(scene.agent)
    (transport,) = scene.reader.transports
    for endpoint in (scene.owner.endpoint, *scene.owner.endpoint.others):
        with pytest.raises(TransferFailed, match="connected"):
            transport.fetch(endpoint.agent, blocks(1), blocks(1))
    scene.connect()
    scene.connect()
    assert scene.fetch_status() is FetchStatus.DONE


def test_an_owner_of_which_one_rank_cannot_be_reached_is_not_connected_at_all(scene: Scene) -> None:
    whole = scene.owner.endpoint
    broken = replace(whole.others[0], agent=new_agent_name())
    with pytest.raises(TransferFailed):
        scene.rank.connect(replace(whole, others=(broken,)), scene.owner.fingerprint)
    with pytest.raises(TransferFailed, match="no connected peer"):
        scene.fetch_status()
    scene.connect()
    assert scene.fetch_status() is FetchStatus.DONE


def test_an_owner_whose_ranks_are_not_those_of_its_fingerprint_is_refused(scene: Scene) -> None:
    endpoint, fingerprint = scene.owner.endpoint, scene.owner.fingerprint
    with pytest.raises(LayoutMismatch, match="tells of 1 ranks, but its fingerprint of 2"):
        scene.rank.connect(replace(endpoint, others=()), fingerprint)
    with pytest.raises(LayoutMismatch, match="of 0"):
        scene.rank.connect(endpoint, replace(fingerprint, pipeline_parallel_size=0))
    alone = replace(endpoint, others=())
    with pytest.raises(LayoutMismatch, match=r"has 1024 bytes, but one of such KV has 2048.*'m'"):
        scene.rank.connect(alone, replace(fingerprint, tensor_parallel_size=1))


def test_blocks_of_several_ranks_have_no_checksums(scene: Scene) -> None:
    pools = RankPools(fingerprint_of(RankLayout(2), 4))
    with pytest.raises(StartupError, match=r"2 ranks.*kv_transfer\.checksum: false"):
        LayoutReader(pools.memories[0], pools.fingerprint, scene.reader_transport, checksum=block_checksums)
    pools = RankPools(fingerprint_of(RankLayout(1), 4))
    reader = LayoutReader(
        pools.memories[0], pools.fingerprint, scene.reader_transport, checksum=block_checksums
    )
    with pytest.raises(LayoutMismatch, match=r"several ranks.*kv_transfer\.checksum: false"):
        reader.connect(scene.owner.endpoint, scene.owner.fingerprint)


def test_a_pool_that_cannot_be_this_ranks_is_refused(scene: Scene) -> None:
    with pytest.raises(StartupError, match="100 bytes cannot hold 32 rows"):
        LayoutReader(PoolMemory.allocate(2, 100), fingerprint_of(RankLayout(1), 4), scene.reader_transport)


@pytest.mark.nixl
def test_ranks_in_another_process_are_read_over_nixl() -> None:
    script = Path(__file__).with_name("rank_owner.py")
    wire = Wire("nixl")
    reader = Reader(wire, fingerprint_of(RankLayout(1, 2), 4))
    expected = RankPools(reader.pools.fingerprint)
    expected.fill(random_kv(expected.fingerprint))
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = base64.b64decode(process.stdout.readline())
        endpoint = endpoint_from_wire(pb.TransportEndpoint.FromString(line))
        for rank in reader.ranks:
            rank.connect(endpoint, fingerprint_of(RankLayout(2), 4))
            read = rank.fetch_tokens(endpoint.agent, THEIR_TABLE, MY_TABLE, range(12))
            assert finish(read) is FetchStatus.DONE
        process.communicate()
    for rank in range(2):
        assert torch.equal(reader.pools.tokens(rank, MY_TABLE), expected.tokens(rank, THEIR_TABLE))
    wire.close()
