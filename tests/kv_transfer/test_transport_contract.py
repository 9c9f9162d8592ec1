"""What every KV transport promises, tried on each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from transport_kit import (
    Wire,
    all_finish,
    block_content,
    blocks,
    content,
    filled_pool,
    finish,
    new_agent_name,
)

from kv_transfer import FaultyTransport, PoolMemory
from protocol.errors import LayoutMismatch, TransferFailed
from protocol.faults import FaultPlan
from protocol.handoff import Span
from protocol.ports import FetchStatus, KvTransport

NUM_BLOCKS = 12
BLOCK_BYTES = 1536
OWNER_SALT, READER_SALT = 1, 101


def faulty(transport: KvTransport, memory: PoolMemory) -> KvTransport:
    """A plan without faults changes nothing."""
    return FaultyTransport(transport, memory, FaultPlan())


WIRES = [
    pytest.param(lambda: Wire("loopback"), id="loopback"),
    pytest.param(lambda: Wire("nixl"), id="nixl", marks=pytest.mark.nixl),
    pytest.param(lambda: Wire("gloo"), id="gloo"),
    pytest.param(lambda: Wire("loopback", faulty), id="faulty-loopback"),
    pytest.param(lambda: Wire("nixl", faulty), id="faulty-nixl", marks=pytest.mark.nixl),
    pytest.param(lambda: Wire("gloo", faulty), id="faulty-gloo"),
]


@dataclass
class Pair:
    """An owner whose pool a connected reader may read."""

    wire: Wire
    owner: KvTransport
    owner_memory: PoolMemory
    reader: KvTransport
    reader_memory: PoolMemory

    @property
    def agent(self) -> str:
        return self.owner.endpoint.agent


def owner_block(block_id: int) -> bytes:
    return block_content(BLOCK_BYTES, OWNER_SALT, block_id)


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    wire: Wire = request.param()
    yield wire
    wire.close()


@pytest.fixture
def pair(wire: Wire) -> Pair:
    owner_memory = filled_pool(NUM_BLOCKS, BLOCK_BYTES, OWNER_SALT)
    reader_memory = filled_pool(NUM_BLOCKS, BLOCK_BYTES, READER_SALT)
    pair = Pair(wire, wire.attach(owner_memory), owner_memory, wire.attach(reader_memory), reader_memory)
    pair.reader.connect(pair.owner.endpoint)
    return pair


def test_a_read_moves_the_named_blocks_in_order_and_touches_no_other(pair: Pair) -> None:
    owner_before, expected = content(pair.owner_memory), content(pair.reader_memory)
    assert finish(pair.reader.fetch(pair.agent, blocks(3, 1, 11), blocks(2, 9, 4))) is FetchStatus.DONE
    expected[2], expected[9], expected[4] = owner_block(3), owner_block(1), owner_block(11)
    assert content(pair.reader_memory) == expected
    assert content(pair.owner_memory) == owner_before


def test_a_read_sees_what_the_owner_wrote_before_it_started(pair: Pair) -> None:
    pair.owner_memory.block_view(blocks(5)[0])[:] = b"\x42" * BLOCK_BYTES
    finish(pair.reader.fetch(pair.agent, blocks(5), blocks(5)))
    assert content(pair.reader_memory)[5] == b"\x42" * BLOCK_BYTES


def test_the_first_and_the_last_block_of_a_pool_can_be_read(pair: Pair) -> None:
    finish(pair.reader.fetch(pair.agent, blocks(1, NUM_BLOCKS - 1), blocks(NUM_BLOCKS - 1, 1)))
    after = content(pair.reader_memory)
    assert (after[NUM_BLOCKS - 1], after[1]) == (owner_block(1), owner_block(NUM_BLOCKS - 1))


def test_one_remote_block_can_go_to_two_local_ones(pair: Pair) -> None:
    finish(pair.reader.fetch(pair.agent, blocks(3, 3), blocks(1, 2)))
    assert content(pair.reader_memory)[1:3] == [owner_block(3)] * 2


def test_many_reads_from_many_owners_are_in_flight_at_once(pair: Pair) -> None:
    other_salt = 55
    other = pair.wire.attach(filled_pool(NUM_BLOCKS, BLOCK_BYTES, other_salt))
    pair.reader.connect(other.endpoint)
    handles = [
        pair.reader.fetch((pair.agent, other.endpoint.agent)[i % 2], blocks(NUM_BLOCKS - i), blocks(i))
        for i in range(1, NUM_BLOCKS)
    ]
    assert all_finish(reversed(handles)) == {FetchStatus.DONE}
    salts = (OWNER_SALT, other_salt)
    assert content(pair.reader_memory)[1:] == [
        block_content(BLOCK_BYTES, salts[i % 2], NUM_BLOCKS - i) for i in range(1, NUM_BLOCKS)
    ]


def test_two_workers_read_from_each_other(pair: Pair) -> None:
    pair.owner.connect(pair.reader.endpoint)
    there = pair.reader.fetch(pair.agent, blocks(1), blocks(2))
    back = pair.owner.fetch(pair.reader.endpoint.agent, blocks(3), blocks(4))
    assert all_finish([there, back]) == {FetchStatus.DONE}
    assert content(pair.reader_memory)[2] == owner_block(1)
    assert content(pair.owner_memory)[4] == block_content(BLOCK_BYTES, READER_SALT, 3)


def test_terminal_states_are_sticky_and_release_is_idempotent(pair: Pair) -> None:
    handle = pair.reader.fetch(pair.agent, blocks(1), blocks(1))
    assert finish(handle) is FetchStatus.DONE
    handle.release()
    handle.release()
    assert handle.poll() is FetchStatus.DONE


def test_a_handle_says_how_many_bytes_it_moves(pair: Pair) -> None:
    handle = pair.reader.fetch(pair.agent, blocks(1, 2, 3), blocks(1, 2, 3))
    finish(handle)
    assert handle.num_bytes == 3 * BLOCK_BYTES


def test_a_read_of_no_blocks_is_done_and_touches_nothing(pair: Pair) -> None:
    before = content(pair.reader_memory)
    handle = pair.reader.fetch(pair.agent, [], [])
    assert (finish(handle), handle.num_bytes) == (FetchStatus.DONE, 0)
    assert content(pair.reader_memory) == before


@pytest.mark.parametrize(
    ("remote", "local", "complaint"),
    [
        ((NUM_BLOCKS,), (1,), "remote"),
        ((1,), (NUM_BLOCKS,), "local"),
        ((-1,), (1,), "remote"),
        ((1,), (-1,), "local"),
        ((0,), (1,), "remote"),
        ((1,), (0,), "local"),
        ((1, 2), (1,), "2 remote blocks"),
        ((1, 2), (3, 3), "twice"),
        ((1, 2**40), (3, 4), "remote"),
    ],
)
def test_a_read_out_of_bounds_is_refused_before_anything_is_touched(
    pair: Pair, remote: tuple[int, ...], local: tuple[int, ...], complaint: str
) -> None:
    before = content(pair.reader_memory)
    with pytest.raises(TransferFailed, match=complaint):
        pair.reader.fetch(pair.agent, blocks(*remote), blocks(*local))
    assert content(pair.reader_memory) == before


def test_remote_blocks_are_bounded_by_the_peers_pool_not_by_the_own(pair: Pair) -> None:
    small = pair.wire.attach(filled_pool(4, BLOCK_BYTES, OWNER_SALT))
    pair.reader.connect(small.endpoint)
    with pytest.raises(TransferFailed, match="1 to 3"):
        pair.reader.fetch(small.endpoint.agent, blocks(4), blocks(4))
    assert finish(pair.reader.fetch(small.endpoint.agent, blocks(3), blocks(9))) is FetchStatus.DONE
    assert content(pair.reader_memory)[9] == owner_block(3)


def test_a_read_from_an_unknown_peer_is_refused(pair: Pair) -> None:
    with pytest.raises(TransferFailed, match="nobody"):
        pair.reader.fetch("nobody", blocks(1), blocks(1))


def test_connect_is_idempotent(pair: Pair) -> None:
    pair.reader.connect(pair.owner.endpoint)
    pair.reader.connect(pair.owner.endpoint)
    assert finish(pair.reader.fetch(pair.agent, blocks(1), blocks(1))) is FetchStatus.DONE


def test_connect_refuses_other_blocks_and_shows_both_sizes(pair: Pair) -> None:
    other = pair.wire.attach(PoolMemory.allocate(NUM_BLOCKS, 2 * BLOCK_BYTES))
    with pytest.raises(LayoutMismatch, match=rf"{BLOCK_BYTES} bytes here.*{2 * BLOCK_BYTES} there"):
        pair.reader.connect(other.endpoint)


def test_connect_refuses_another_kind_of_transport(pair: Pair) -> None:
    stranger = replace(pair.owner.endpoint, transport="pigeon", agent=new_agent_name())
    with pytest.raises(LayoutMismatch, match="pigeon"):
        pair.reader.connect(stranger)


def test_connect_refuses_a_second_agent_of_a_connected_ones_name(pair: Pair) -> None:
    other = pair.wire.attach(filled_pool(NUM_BLOCKS, BLOCK_BYTES, 9))
    with pytest.raises(TransferFailed, match="twice"):
        pair.reader.connect(replace(other.endpoint, agent=pair.agent))


def test_connect_refuses_metadata_of_another_agent(pair: Pair) -> None:
    other = pair.wire.attach(filled_pool(NUM_BLOCKS, BLOCK_BYTES, 9))
    with pytest.raises(TransferFailed):
        pair.reader.connect(replace(other.endpoint, agent=new_agent_name()))
    pair.reader.connect(other.endpoint)
    assert finish(pair.reader.fetch(other.endpoint.agent, blocks(1), blocks(1))) is FetchStatus.DONE


def test_connect_refuses_the_own_agent(pair: Pair) -> None:
    with pytest.raises(TransferFailed, match="itself"):
        pair.reader.connect(pair.reader.endpoint)


def test_garbled_metadata_is_refused_and_the_true_one_still_works(pair: Pair) -> None:
    other = pair.wire.attach(filled_pool(NUM_BLOCKS, BLOCK_BYTES, OWNER_SALT))
    whole = other.endpoint.metadata
    for i in range(0, len(whole), max(1, len(whole) // 50)):
        garbled = whole[:i] + bytes([whole[i] ^ 0x10]) + whole[i + 1 :]
        for metadata in (garbled, whole[:i]):
            with pytest.raises(TransferFailed, match="garbled"):
                pair.reader.connect(replace(other.endpoint, metadata=metadata))
    pair.reader.connect(other.endpoint)
    assert finish(pair.reader.fetch(other.endpoint.agent, blocks(1), blocks(1))) is FetchStatus.DONE


def test_a_disconnected_peer_cannot_be_read_until_it_is_connected_again(pair: Pair) -> None:
    pair.reader.disconnect(pair.agent)
    pair.reader.disconnect(pair.agent)
    pair.reader.disconnect("never connected")
    with pytest.raises(TransferFailed):
        pair.reader.fetch(pair.agent, blocks(1), blocks(1))
    pair.reader.connect(pair.owner.endpoint)
    assert finish(pair.reader.fetch(pair.agent, blocks(1), blocks(1))) is FetchStatus.DONE


def test_a_restarted_owner_is_read_under_its_new_name(pair: Pair) -> None:
    """Regression elsewhere: endpoints of a restarted peer were used again and crashed the reader."""
    pair.reader.disconnect(pair.agent)
    pair.owner.close()
    reborn = pair.wire.attach(filled_pool(NUM_BLOCKS, BLOCK_BYTES, 77))
    pair.reader.connect(reborn.endpoint)
    assert finish(pair.reader.fetch(reborn.endpoint.agent, blocks(6), blocks(6))) is FetchStatus.DONE
    assert content(pair.reader_memory)[6] == block_content(BLOCK_BYTES, 77, 6)
    with pytest.raises(TransferFailed):
        pair.reader.fetch(pair.agent, blocks(1), blocks(1))


def test_a_closed_transport_reads_nothing_and_close_is_idempotent(pair: Pair) -> None:
    pair.reader.close()
    pair.reader.close()
    with pytest.raises(TransferFailed):
        pair.reader.fetch(pair.agent, blocks(1), blocks(1))
    with pytest.raises(TransferFailed, match="closed"):
        pair.reader.connect(pair.owner.endpoint)
    pair.reader.disconnect(pair.agent)


def test_the_endpoint_describes_the_pool_and_stays_the_same(pair: Pair) -> None:
    endpoint = pair.owner.endpoint
    assert endpoint == pair.owner.endpoint
    assert endpoint.transport == pair.wire.kind
    assert (endpoint.pool.num_blocks, endpoint.pool.block_bytes) == (NUM_BLOCKS, BLOCK_BYTES)


SPANS = [Span(1000, 0, 500), Span(0, 512, 100), Span(100, 612, 28), Span(1500, 1535, 1)]
"""The second and the third are neighbours on both sides."""


def with_spans(block: bytes, source: bytes, spans: list[Span]) -> bytes:
    """What `block` is once the spans of `source` have landed in it."""
    result = bytearray(block)
    for span in spans:
        piece = source[span.their_offset : span.their_offset + span.num_bytes]
        result[span.my_offset : span.my_offset + span.num_bytes] = piece
    return bytes(result)


def test_spans_of_blocks_land_where_they_belong_and_touch_nothing_else(pair: Pair) -> None:
    pair.reader.disconnect(pair.agent)
    pair.reader.connect(pair.owner.endpoint, SPANS)
    expected = content(pair.reader_memory)
    handle = pair.reader.fetch(pair.agent, blocks(3, 1, 11), blocks(2, 9, 4))
    assert finish(handle) is FetchStatus.DONE
    assert handle.num_bytes == 3 * 629
    for mine, theirs in ((2, 3), (9, 1), (4, 11)):
        expected[mine] = with_spans(expected[mine], owner_block(theirs), SPANS)
    assert content(pair.reader_memory) == expected


@pytest.mark.parametrize("their_bytes", [BLOCK_BYTES // 2, 2 * BLOCK_BYTES])
def test_spans_pass_between_blocks_of_unequal_size(pair: Pair, their_bytes: int) -> None:
    other = pair.wire.attach(filled_pool(4, their_bytes, 7))
    spans = [Span(their_bytes - 200, 64, 200), Span(0, BLOCK_BYTES - 300, 300)]
    pair.reader.connect(other.endpoint, spans)
    expected = content(pair.reader_memory)
    assert finish(pair.reader.fetch(other.endpoint.agent, blocks(3, 1), blocks(1, 11))) is FetchStatus.DONE
    for mine, theirs in ((1, 3), (11, 1)):
        expected[mine] = with_spans(expected[mine], block_content(their_bytes, 7, theirs), spans)
    assert content(pair.reader_memory) == expected


def test_two_owners_fill_one_block_together(pair: Pair) -> None:
    """As ranks do. Whole blocks of a third one are read all the same."""
    half = BLOCK_BYTES // 2
    owners = [pair.wire.attach(filled_pool(NUM_BLOCKS, half, salt)) for salt in (21, 22)]
    for place, owner in enumerate(owners):
        pair.reader.connect(owner.endpoint, [Span(0, place * half, half)])
    agents = [owner.endpoint.agent for owner in owners]
    handles = [pair.reader.fetch(agent, blocks(5), blocks(6)) for agent in agents]
    handles.append(pair.reader.fetch(pair.agent, blocks(5), blocks(7)))
    assert all_finish(handles) == {FetchStatus.DONE}
    both = block_content(half, 21, 5) + block_content(half, 22, 5)
    assert content(pair.reader_memory)[6:8] == [both, owner_block(5)]


def test_a_span_of_the_whole_block_is_as_none(pair: Pair) -> None:
    pair.reader.connect(pair.owner.endpoint, [Span(0, 0, BLOCK_BYTES)])
    assert finish(pair.reader.fetch(pair.agent, blocks(1), blocks(1))) is FetchStatus.DONE
    assert content(pair.reader_memory)[1] == owner_block(1)


@pytest.mark.parametrize(
    ("spans", "complaint"),
    [
        ([], "none"),
        ([Span(0, 0, 0)], "holds nothing"),
        ([Span(-1, 0, 5)], "before the block"),
        ([Span(0, -1, 5)], "before the block"),
        ([Span(0, 0, 10), Span(20, 9, 5)], "overlaps"),
        ([Span(0, BLOCK_BYTES - 4, 5)], "bytes here"),
        ([Span(BLOCK_BYTES - 4, 0, 5)], "bytes there"),
    ],
)
def test_spans_beyond_a_block_or_over_each_other_are_refused(
    pair: Pair, spans: list[Span], complaint: str
) -> None:
    other = pair.wire.attach(filled_pool(NUM_BLOCKS, BLOCK_BYTES, 9))
    with pytest.raises(LayoutMismatch, match=complaint):
        pair.reader.connect(other.endpoint, spans)
    pair.reader.connect(other.endpoint)
    assert finish(pair.reader.fetch(other.endpoint.agent, blocks(1), blocks(1))) is FetchStatus.DONE


def test_a_peer_is_disconnected_before_it_is_read_by_other_spans(pair: Pair) -> None:
    with pytest.raises(TransferFailed, match="other spans"):
        pair.reader.connect(pair.owner.endpoint, SPANS)
    pair.reader.disconnect(pair.agent)
    pair.reader.connect(pair.owner.endpoint, SPANS)
    pair.reader.connect(pair.owner.endpoint, SPANS)
    with pytest.raises(TransferFailed, match="other spans"):
        pair.reader.connect(pair.owner.endpoint)


def test_the_other_ranks_of_a_peer_do_not_matter_to_its_connection(pair: Pair) -> None:
    pair.reader.connect(replace(pair.owner.endpoint, others=(pair.reader.endpoint,)))
    assert finish(pair.reader.fetch(pair.agent, blocks(1), blocks(1))) is FetchStatus.DONE
