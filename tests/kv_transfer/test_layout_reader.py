"""Tokens are read right whatever the layouts of the two sides are, over every transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_kit import NUM_TOKENS, TORCH, Side
from transport_kit import Wire, blocks, finish, new_agent_name

from kv_transfer import (
    FaultKind,
    FaultyTransport,
    LayoutReader,
    MemoryKind,
    PoolMemory,
    agent_name,
    block_checksums,
    create_transport,
)
from protocol.errors import LayoutMismatch, StartupError, TransferFailed
from protocol.faults import FaultPlan
from protocol.ids import WorkerId, WorkerIdentity
from protocol.ports import FetchStatus, KvTransport, TokenFetch

LAYOUTS = [(8, "float32"), (8, "bfloat16"), (32, "float32"), (32, "bfloat16"), (12, "float32")]
ALL = range(NUM_TOKENS)
POSITIONS = st.integers(0, NUM_TOKENS)

Attach = Callable[[PoolMemory], KvTransport]


class Scene:
    """An owner, and a reader of maybe another layout."""

    def __init__(
        self,
        wire: Wire,
        theirs: tuple[int, str],
        mine: tuple[int, str],
        *,
        num_staging_blocks: int = 5,
        with_checksums: bool = False,
    ) -> None:
        self.owner = Side(*theirs, seed=1)
        self.mine = Side(*mine, seed=2)
        self.endpoint = wire.attach(self.owner.memory).endpoint
        self.agent = self.endpoint.agent
        staging_bytes = num_staging_blocks * self.owner.layout.block_bytes
        self.reader = self.mine.reader(wire, staging_bytes, with_checksums=with_checksums)
        self.reader.connect(self.endpoint, self.owner.fingerprint)

    def fetch(self, tokens: range = ALL) -> TokenFetch:
        return self.reader.fetch_tokens(self.agent, self.owner.table, self.mine.table, tokens)

    def expected(self) -> torch.Tensor:
        return self.owner.tokens().to(TORCH[self.mine.layout.dtype])


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


@pytest.mark.parametrize("mine", LAYOUTS, ids=str)
@pytest.mark.parametrize("theirs", LAYOUTS, ids=str)
def test_all_tokens_arrive_bit_by_bit_or_as_torch_casts_them(
    loopback: Wire, theirs: tuple[int, str], mine: tuple[int, str]
) -> None:
    scene = Scene(loopback, theirs, mine)
    assert finish(scene.fetch()) is FetchStatus.DONE
    assert torch.equal(scene.mine.tokens(), scene.expected())
    scene.reader.close()


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        ((8, "float32"), (32, "bfloat16")),
        ((32, "bfloat16"), (8, "float32")),
        ((8, "float32"), (8, "bfloat16")),
        ((32, "float32"), (12, "float32")),
        ((8, "bfloat16"), (8, "bfloat16")),
    ],
    ids=str,
)
def test_all_tokens_arrive_over_nixl(theirs: tuple[int, str], mine: tuple[int, str]) -> None:
    wire = Wire("nixl")
    scene = Scene(wire, theirs, mine)
    assert finish(scene.fetch()) is FetchStatus.DONE
    assert torch.equal(scene.mine.tokens(), scene.expected())
    scene.reader.close()
    wire.close()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, NUM_TOKENS), st.integers(0, NUM_TOKENS), st.sampled_from(LAYOUTS[1:]), st.integers(3, 9)
)
def test_a_range_of_tokens_leaves_all_others_as_they_were(
    one: int, other: int, theirs: tuple[int, str], num_staging_blocks: int
) -> None:
    """So a block that is shared with other sequences, or partly filled, keeps what it has."""
    tokens = range(min(one, other), max(one, other))
    wire = Wire("loopback")
    scene = Scene(wire, theirs, LAYOUTS[0], num_staging_blocks=num_staging_blocks)
    scene.mine.poison()
    assert finish(scene.fetch(tokens)) is FetchStatus.DONE
    expected = torch.full_like(scene.mine.tokens(), -7.0)
    expected[:, tokens.start : tokens.stop] = scene.expected()[:, tokens.start : tokens.stop]
    assert torch.equal(scene.mine.tokens(), expected)
    scene.reader.close()
    wire.close()


def test_equal_layouts_read_whole_blocks_straight_into_the_pool(wire: Wire) -> None:
    scene = Scene(wire, (8, "float32"), (8, "float32"))
    handle = scene.fetch(range(16, 33))
    assert handle.num_bytes == 3 * scene.mine.layout.block_bytes
    assert finish(handle) is FetchStatus.DONE
    mine, theirs = scene.mine, scene.owner
    for index in range(2, 5):
        assert torch.equal(mine.blocks[mine.table[index]], theirs.blocks[theirs.table[index]])
    scene.reader.close()


def test_chunks_that_follow_one_another_make_up_the_whole(wire: Wire) -> None:
    scene = Scene(wire, (12, "float32"), (8, "bfloat16"))
    for tokens in (range(24), range(24, 40), range(40, 96), range(96, NUM_TOKENS)):
        assert finish(scene.fetch(tokens)) is FetchStatus.DONE
    assert torch.equal(scene.mine.tokens(), scene.expected())
    scene.reader.close()


def test_many_reads_share_one_small_staging_area(wire: Wire) -> None:
    scene = Scene(wire, (8, "bfloat16"), (32, "float32"), num_staging_blocks=3)
    handles = [scene.fetch(range(start, start + 10)) for start in range(0, NUM_TOKENS, 10)]
    pending = list(handles)
    while pending:  # in turn, as the transport's thread polls them
        pending = [handle for handle in pending if handle.poll() is FetchStatus.PENDING]
    assert {finish(handle) for handle in handles} == {FetchStatus.DONE}
    assert torch.equal(scene.mine.tokens(), scene.expected())
    scene.reader.close()


def test_owners_of_several_layouts_are_read_at_once(wire: Wire) -> None:
    scene = Scene(wire, (8, "float32"), (8, "float32"))
    other = Side(32, "bfloat16", seed=5)
    endpoint = wire.attach(other.memory).endpoint
    scene.reader.connect(endpoint, other.fingerprint)
    half = range(48), range(48, NUM_TOKENS)
    handles = [
        scene.fetch(half[0]),
        scene.reader.fetch_tokens(endpoint.agent, other.table, scene.mine.table, half[1]),
    ]
    assert {finish(handle) for handle in handles} == {FetchStatus.DONE}
    expected = torch.cat([scene.expected()[:, :48], other.tokens().float()[:, 48:]], dim=1)
    assert torch.equal(scene.mine.tokens(), expected)
    scene.reader.close()


@pytest.mark.parametrize("theirs", [(8, "float32"), (32, "bfloat16")], ids=str)
def test_no_tokens_are_read_at_once(loopback: Wire, theirs: tuple[int, str]) -> None:
    scene = Scene(loopback, theirs, (8, "float32"))
    handle = scene.fetch(range(40, 40))
    assert finish(handle) is FetchStatus.DONE
    assert handle.num_bytes == 0
    scene.reader.close()


@pytest.mark.parametrize("theirs", [(8, "float32"), (32, "bfloat16")], ids=str)
def test_checksums_are_those_of_the_owners_blocks(loopback: Wire, theirs: tuple[int, str]) -> None:
    scene = Scene(loopback, theirs, (8, "float32"), with_checksums=True)
    found: dict[int, int] = {}
    for tokens in (range(40), range(40, NUM_TOKENS)):
        handle = scene.fetch(tokens)
        while handle.poll() is FetchStatus.PENDING:
            pass
        found |= handle.checksums()
        handle.release()
    assert found == dict(enumerate(block_checksums(scene.owner.memory, scene.owner.table)))
    scene.reader.close()


@pytest.mark.parametrize("theirs", [(8, "float32"), (32, "bfloat16")], ids=str)
def test_a_reader_takes_no_checksums_unless_told_to(loopback: Wire, theirs: tuple[int, str]) -> None:
    scene = Scene(loopback, theirs, (8, "float32"))
    handle = scene.fetch()
    assert finish(handle) is FetchStatus.DONE
    assert handle.checksums() == {}
    scene.reader.close()


@pytest.mark.parametrize("theirs", [(8, "float32"), (32, "bfloat16")], ids=str)
@pytest.mark.parametrize(
    ("cut", "complaint"),
    [("their", "owner's block table has"), ("my", "reader's block table has")],
)
def test_a_table_that_is_too_short_is_refused_before_anything_is_touched(
    loopback: Wire, theirs: tuple[int, str], cut: str, complaint: str
) -> None:
    scene = Scene(loopback, theirs, (8, "float32"))
    before = scene.mine.blocks.clone()
    tables = {"their": scene.owner.table, "my": scene.mine.table}
    tables[cut] = tables[cut][:-1]
    with pytest.raises(TransferFailed, match=complaint):
        scene.reader.fetch_tokens(scene.agent, tables["their"], tables["my"], ALL)
    assert torch.equal(scene.mine.blocks, before)
    scene.reader.close()


@pytest.mark.parametrize("theirs", [(8, "float32"), (32, "bfloat16")], ids=str)
@pytest.mark.parametrize("bad", [0, 10_000])
@pytest.mark.parametrize("whose", ["their", "my"])
def test_blocks_outside_the_pools_are_refused_before_anything_is_touched(
    loopback: Wire, theirs: tuple[int, str], bad: int, whose: str
) -> None:
    scene = Scene(loopback, theirs, (8, "float32"))
    before = scene.mine.blocks.clone()
    tables = {"their": list(scene.owner.table), "my": list(scene.mine.table)}
    tables[whose][-1] = blocks(bad)[0]
    with pytest.raises(TransferFailed, match="not among"):
        scene.reader.fetch_tokens(scene.agent, tables["their"], tables["my"], ALL)
    assert torch.equal(scene.mine.blocks, before)
    scene.reader.close()


@pytest.mark.parametrize("theirs", [(8, "float32"), (32, "bfloat16")], ids=str)
def test_a_block_of_ones_own_that_comes_twice_is_refused(loopback: Wire, theirs: tuple[int, str]) -> None:
    scene = Scene(loopback, theirs, (8, "float32"))
    scene.mine.table[1] = scene.mine.table[0]
    with pytest.raises(TransferFailed, match="twice"):
        scene.fetch()
    scene.reader.close()


@pytest.mark.parametrize("theirs", [(8, "float32"), (32, "bfloat16")], ids=str)
@pytest.mark.parametrize("tokens", [range(-8, 8), range(0, 16, 2), range(16, 0, -1)])
def test_what_is_no_range_of_tokens_is_refused(
    loopback: Wire, theirs: tuple[int, str], tokens: range
) -> None:
    scene = Scene(loopback, theirs, (8, "float32"))
    with pytest.raises(TransferFailed, match="no range"):
        scene.fetch(tokens)
    scene.reader.close()


@pytest.mark.parametrize("theirs", [(8, "float32"), (32, "bfloat16")], ids=str)
def test_a_disconnected_owner_cannot_be_read_until_it_is_connected_again(
    wire: Wire, theirs: tuple[int, str]
) -> None:
    scene = Scene(wire, theirs, (8, "float32"))
    scene.reader.connect(scene.endpoint, scene.owner.fingerprint)
    scene.reader.disconnect(scene.agent)
    scene.reader.disconnect(scene.agent)
    with pytest.raises(TransferFailed):
        scene.fetch()
    scene.reader.connect(scene.endpoint, scene.owner.fingerprint)
    assert finish(scene.fetch()) is FetchStatus.DONE
    scene.reader.close()
    scene.reader.close()
    with pytest.raises(TransferFailed):
        scene.fetch()


@pytest.mark.parametrize(
    "change",
    [{"num_layers": 4}, {"head_dim": 16}, {"revision": "other"}, {"kv_dtype": "int8"}, {"block_size": 0}],
    ids=str,
)
def test_an_owner_of_anything_else_is_refused_with_both_fingerprints(
    loopback: Wire, change: dict[str, object]
) -> None:
    scene = Scene(loopback, (32, "bfloat16"), (8, "float32"))
    theirs = replace(scene.owner.fingerprint, **change)  # type: ignore[arg-type]
    with pytest.raises(LayoutMismatch) as caught:
        scene.reader.connect(scene.endpoint, theirs)
    assert str(theirs) in caught.value.message
    assert str(scene.mine.fingerprint) in caught.value.message
    scene.reader.close()


def test_an_owner_whose_blocks_are_not_what_its_fingerprint_says_is_refused(loopback: Wire) -> None:
    scene = Scene(loopback, (32, "bfloat16"), (8, "float32"))
    with pytest.raises(LayoutMismatch, match="bytes"):
        scene.reader.connect(scene.endpoint, replace(scene.owner.fingerprint, block_size=16))
    scene.reader.close()


def test_a_staging_area_that_cannot_be_made_fails_the_connect(loopback: Wire) -> None:
    owner, mine = Side(32, "float32", seed=1), Side(8, "float32", seed=2)

    def make(memory: PoolMemory, serial: int) -> KvTransport:
        if serial:
            raise StartupError("no memory can be registered")
        return loopback.attach(memory)

    reader = LayoutReader(mine.memory, mine.fingerprint, make)
    with pytest.raises(TransferFailed, match="registered"):
        reader.connect(loopback.attach(owner.memory).endpoint, owner.fingerprint)


def test_device_memory_takes_over_kv_of_its_own_layout_only(loopback: Wire) -> None:
    owner, mine = Side(32, "float32", seed=1), Side(8, "float32", seed=2)
    memory = PoolMemory(4096, 8, mine.layout.block_bytes, MemoryKind.DEVICE)
    reader = LayoutReader(memory, mine.fingerprint, lambda pool, serial: loopback.attach(mine.memory))
    with pytest.raises(LayoutMismatch, match="host memory only"):
        reader.connect(loopback.attach(owner.memory).endpoint, owner.fingerprint)


def test_the_agents_of_one_worker_have_names_of_their_own(loopback: Wire) -> None:
    owner, mine = Side(32, "float32", seed=1), Side(8, "float32", seed=2)
    identity = WorkerIdentity(WorkerId("d0"), "first")
    names = []

    def make(memory: PoolMemory, serial: int) -> KvTransport:
        names.append(agent_name(identity, 0, serial))
        return create_transport("loopback", memory, names[-1], network=loopback.network)

    reader = LayoutReader(mine.memory, mine.fingerprint, make)
    endpoint = loopback.attach(owner.memory, new_agent_name()).endpoint
    reader.connect(endpoint, owner.fingerprint)
    reader.connect(endpoint, owner.fingerprint)
    assert names == ["d0@first/rank0#0", "d0@first/rank0#1"]
    reader.close()


class FaultyScene(Scene):
    """All reads of the reader go wrong as scripted."""

    def __init__(self, plain: Wire, theirs: tuple[int, str]) -> None:
        self.plan: FaultPlan[FaultKind] = FaultPlan()
        faulty = Wire(plain.kind, lambda inner, memory: FaultyTransport(inner, memory, self.plan))
        faulty.network = plain.network
        super().__init__(faulty, theirs, (8, "float32"), with_checksums=True)

    def right_checksums(self) -> dict[int, int]:
        return dict(enumerate(block_checksums(self.owner.memory, self.owner.table)))


BOTH = pytest.mark.parametrize("theirs", [(8, "float32"), (32, "bfloat16"), (12, "float32")], ids=str)


@BOTH
@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.DISCONNECT])
def test_a_read_fails_when_any_chunk_of_it_does(
    loopback: Wire, theirs: tuple[int, str], kind: FaultKind
) -> None:
    scene = FaultyScene(loopback, theirs)
    if theirs != (8, "float32"):
        scene.plan.script(None)  # the first chunk goes well
    scene.plan.script(kind)
    assert finish(scene.fetch()) is FetchStatus.FAILED
    scene.reader.disconnect(scene.agent)
    scene.reader.connect(scene.endpoint, scene.owner.fingerprint)
    assert finish(scene.fetch()) is FetchStatus.DONE
    assert torch.equal(scene.mine.tokens(), scene.expected())
    scene.reader.close()


@BOTH
def test_a_read_that_cannot_be_started_is_refused_and_takes_nothing(
    loopback: Wire, theirs: tuple[int, str]
) -> None:
    scene = FaultyScene(loopback, theirs)
    for _ in range(20):
        scene.plan.script(FaultKind.REFUSE)
        with pytest.raises(TransferFailed, match="started"):
            scene.fetch()
    assert finish(scene.fetch()) is FetchStatus.DONE
    scene.reader.disconnect(scene.agent)
    scene.reader.close()


def test_a_later_chunk_that_cannot_be_started_fails_the_read(loopback: Wire) -> None:
    scene = FaultyScene(loopback, (12, "float32"))
    scene.plan.script(None)
    scene.plan.script(FaultKind.REFUSE)
    assert finish(scene.fetch()) is FetchStatus.FAILED
    assert finish(scene.fetch()) is FetchStatus.DONE
    scene.reader.close()


@BOTH
def test_a_stalled_read_keeps_its_owner_connected_until_it_ends(
    loopback: Wire, theirs: tuple[int, str]
) -> None:
    scene = FaultyScene(loopback, theirs)
    scene.plan.script(FaultKind.STALL)
    handle = scene.fetch()
    assert {handle.poll() for _ in range(50)} == {FetchStatus.PENDING}
    for attempt in (handle.release, scene.reader.close, lambda: scene.reader.disconnect(scene.agent)):
        with pytest.raises(TransferFailed, match="pending"):
            attempt()
    scene.plan.resume()
    assert finish(handle) is FetchStatus.DONE
    assert torch.equal(scene.mine.tokens(), scene.expected())
    scene.reader.disconnect(scene.agent)
    scene.reader.close()


@BOTH
@pytest.mark.parametrize("kind", [FaultKind.BIT_FLIP, FaultKind.TRUNCATE, None])
def test_checksums_tell_what_a_transport_does_not(
    loopback: Wire, theirs: tuple[int, str], kind: FaultKind | None
) -> None:
    scene = FaultyScene(loopback, theirs)
    scene.plan.script(kind)
    handle = scene.fetch()
    while handle.poll() is FetchStatus.PENDING:
        pass
    assert handle.poll() is FetchStatus.DONE
    assert (handle.checksums() == scene.right_checksums()) is (kind is None)
    handle.release()
    scene.reader.close()
