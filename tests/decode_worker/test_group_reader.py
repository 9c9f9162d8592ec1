"""All ranks of a decode worker read, over real gRPC: done when all are, and nothing is used before that."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from rank_kit import UNTOUCHED, Owner, RankPools, fingerprint_of
from transport_kit import Wire, blocks, finish
from worker_fakes import CLUSTER_TOKEN

from decode_worker import GroupReader, RankProxy, RankReadServer
from decode_worker.reader import TransportThread
from kv_transfer import FaultKind, FaultyTransport, LayoutReader, PoolMemory
from protocol.errors import LayoutMismatch, SplitserveError, StartupError, TransferFailed
from protocol.faults import FaultPlan
from protocol.handoff import Fingerprint, PoolDescription, TransportEndpoint
from protocol.ports import FetchStatus, KvTransport, TokenFetch
from protocol.rank_layout import RankLayout
from rpc import Health
from rpc.options import KEEPALIVE_S

THEIR_TABLE, MY_TABLE = blocks(3, 11, 1), blocks(9, 2, 5)
LIMIT_S = 20.0


class Group:
    """A decode worker's ranks, each with a plan for what goes wrong with its reads."""

    def __init__(self, kind: str, theirs: RankLayout, mine: RankLayout, num_kv_heads: int = 4) -> None:
        self.wire = Wire(kind)
        self.owner = Owner(self.wire, fingerprint_of(theirs, num_kv_heads))
        self.agent = self.owner.endpoint.agent
        self.fingerprint = fingerprint_of(mine, num_kv_heads)
        self.pools = RankPools(self.fingerprint)
        self.plans: list[FaultPlan[FaultKind]] = [FaultPlan() for _ in self.pools.memories]
        self.faults: list[SplitserveError] = []
        readers = [self._reader(rank) for rank in range(mine.num_ranks)]
        self.servers = [self._server(reader) for reader in readers[1:]]
        self.addresses = [server.start(LIMIT_S) for server in self.servers]
        self.proxies = [RankProxy(1 + i, a, CLUSTER_TOKEN) for i, a in enumerate(self.addresses)]
        self.reader = GroupReader(readers[0], self.proxies, self.fingerprint)

    def _reader(self, rank: int) -> LayoutReader:
        def attach(memory: PoolMemory, serial: int) -> KvTransport:
            return FaultyTransport(self.wire.attach(memory), memory, self.plans[rank])

        return LayoutReader(self.pools.memories[rank], self.fingerprint, attach, rank=rank)

    def _server(self, reader: LayoutReader) -> RankReadServer:
        return RankReadServer(
            reader, host="127.0.0.1", port=0, token=CLUSTER_TOKEN, on_fault=self.faults.append
        )

    def connect(self, fingerprint: Fingerprint | None = None) -> None:
        self.reader.connect(self.owner.endpoint, fingerprint or self.owner.fingerprint)

    def fetch(self) -> TokenFetch:
        return self.reader.fetch_tokens(self.agent, THEIR_TABLE, MY_TABLE, range(12))

    def let_go(self, read: TokenFetch) -> FetchStatus:
        """Hold no read back any more, those included that other ranks have yet to start."""

        def has_ended() -> bool:
            for plan in self.plans:
                plan.resume()
            return read.poll() is not FetchStatus.PENDING

        wait_until(has_ended)
        return finish(read)

    def assert_all_arrived(self) -> None:
        for rank, part in enumerate(self.pools.parts):
            assert torch.equal(self.pools.tokens(rank, MY_TABLE), self.owner.part(part, THEIR_TABLE))

    def close(self) -> None:
        for plan in self.plans:
            plan.resume()
        self.reader.close()
        for server in self.servers:
            server.stop(LIMIT_S)
        self.wire.close()


MakeGroup = Callable[..., Group]


@pytest.fixture
def make_group() -> Iterator[MakeGroup]:
    groups: list[Group] = []

    def make(kind: str, theirs: RankLayout, mine: RankLayout, num_kv_heads: int = 4) -> Group:
        groups.append(Group(kind, theirs, mine, num_kv_heads))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


@pytest.fixture
def group(make_group: MakeGroup) -> Group:
    """One rank's KV for two ranks."""
    return make_group("loopback", RankLayout(1), RankLayout(2))


@pytest.mark.parametrize("kind", ["loopback", pytest.param("nixl", marks=pytest.mark.nixl)])
@pytest.mark.parametrize(
    ("num_kv_heads", "theirs", "mine"),
    [
        (4, RankLayout(1), RankLayout(2)),
        (4, RankLayout(2), RankLayout(1, 2)),
        (2, RankLayout(2), RankLayout(4)),
        (3, RankLayout(2), RankLayout(2)),
    ],
    ids=str,
)
def test_every_rank_gets_its_part(
    make_group: MakeGroup, kind: str, num_kv_heads: int, theirs: RankLayout, mine: RankLayout
) -> None:
    group = make_group(kind, theirs, mine, num_kv_heads)
    group.connect()
    read = group.fetch()
    assert finish(read) is FetchStatus.DONE
    group.assert_all_arrived()
    assert read.num_bytes == 3 * sum(memory.block_bytes for memory in group.pools.memories)
    assert read.checksums() == {}


@pytest.mark.parametrize("slow", [0, 1])
def test_a_read_is_done_only_when_every_rank_is(group: Group, slow: int) -> None:
    group.connect()
    group.plans[slow].script(FaultKind.STALL)
    read = group.fetch()
    other = group.pools.tensors[1 - slow]
    wait_until(lambda: read.poll() is not FetchStatus.PENDING or bool((other[MY_TABLE] != UNTOUCHED).all()))
    assert read.poll() is FetchStatus.PENDING
    assert group.let_go(read) is FetchStatus.DONE
    group.assert_all_arrived()


@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.REFUSE])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_fails_the_read_when_no_rank_reads_any_more(
    group: Group, failing: int, kind: FaultKind
) -> None:
    group.connect()
    group.plans[failing].script(kind)
    group.plans[1 - failing].script(FaultKind.STALL)
    read = group.fetch()
    assert read.poll() is FetchStatus.PENDING
    assert group.let_go(read) is FetchStatus.FAILED
    assert finish(group.fetch()) is FetchStatus.DONE
    group.assert_all_arrived()


def test_a_lost_rank_leaves_its_read_pending_and_no_other_is_started(group: Group) -> None:
    """Nobody knows what it still writes to; the worker is replaced."""
    group.connect()
    group.plans[1].script(FaultKind.STALL)
    read = group.fetch()
    group.servers[0].stop(LIMIT_S)
    wait_until(lambda: read.poll() is not FetchStatus.PENDING or group.proxies[0].is_lost)
    with pytest.raises(TransferFailed, match=r"rank 1 .* is lost"):
        group.fetch()
    assert [read.poll() for _ in range(3)] == [FetchStatus.PENDING] * 3
    with pytest.raises(TransferFailed, match="pending"):
        read.release()
    group.reader.disconnect(group.agent)  # what has ended has let go of everybody


@pytest.mark.parametrize("failing", [0, 1])
def test_an_owner_that_one_rank_cannot_connect_to_is_connected_to_none(
    make_group: MakeGroup, failing: int
) -> None:
    """Each rank needs another one of the owner's."""
    group = make_group("loopback", RankLayout(2), RankLayout(2))
    group.owner.transports[failing].close()
    with pytest.raises(TransferFailed, match="no agent"):
        group.connect()
    assert finish(group.fetch()) is FetchStatus.FAILED
    for tensor in group.pools.tensors:
        assert (tensor == UNTOUCHED).all()


def test_connections_end_and_begin_again_at_all_ranks(group: Group) -> None:
    group.connect()
    group.connect()
    group.reader.disconnect(group.agent)
    group.reader.disconnect(group.agent)
    assert finish(group.fetch()) is FetchStatus.FAILED
    assert (group.pools.tensors[1] == UNTOUCHED).all()
    group.connect()
    assert finish(group.fetch()) is FetchStatus.DONE


def test_a_mismatch_at_another_rank_is_told_as_one(group: Group) -> None:
    (proxy,) = group.proxies
    other = fingerprint_of(RankLayout(1), num_kv_heads=8)
    error = proxy.connect(group.owner.endpoint, other).error()
    assert isinstance(error, LayoutMismatch)
    assert "num_kv_heads: 4 here, 8 there" in error.message


def test_a_rank_answers_only_to_the_cluster_token(group: Group) -> None:
    stranger = RankProxy(1, group.addresses[0], "a guess")
    error = stranger.connect(group.owner.endpoint, group.owner.fingerprint).error()
    stranger.close()
    assert isinstance(error, TransferFailed)
    assert "wrong or missing cluster token" in error.message


def test_a_rank_that_is_gone_cannot_be_connected_and_need_not_be_disconnected(group: Group) -> None:
    nobody = RankProxy(1, "127.0.0.1:1", CLUSTER_TOKEN, call_limit_s=LIMIT_S)
    error = nobody.connect(group.owner.endpoint, group.owner.fingerprint).error()
    assert isinstance(error, TransferFailed)
    assert nobody.disconnect("x").error() is None
    nobody.close()


def test_a_rank_that_does_not_answer_is_waited_for_up_to_a_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nobody = RankProxy(1, f"127.0.0.1:{silent.getsockname()[1]}", CLUSTER_TOKEN, call_limit_s=0.2)
        assert isinstance(nobody.disconnect("x").error(), TransferFailed)
        nobody.close()


class BrokenReader:
    """Its reads begin, and then it breaks."""

    num_bytes = 0

    def connect(self, peer: TransportEndpoint, fingerprint: Fingerprint) -> None: ...

    def disconnect(self, agent: str) -> None: ...

    def fetch_tokens(self, *read: object) -> BrokenReader:
        return self

    def poll(self) -> FetchStatus:
        raise ZeroDivisionError("the transport is broken")

    def checksums(self) -> Mapping[int, int]:
        raise NotImplementedError

    def release(self) -> None: ...

    def close(self) -> None: ...


def test_a_rank_whose_reading_breaks_says_so_and_is_lost() -> None:
    faults: list[SplitserveError] = []
    server = RankReadServer(
        BrokenReader(), host="127.0.0.1", port=0, token=CLUSTER_TOKEN, on_fault=faults.append
    )
    proxy = RankProxy(1, server.start(LIMIT_S), CLUSTER_TOKEN)
    read = proxy.fetch_tokens("peer", THEIR_TABLE, MY_TABLE, range(12))
    wait_until(lambda: bool(faults))
    assert "the transport is broken" in faults[0].message
    server.stop(LIMIT_S)
    wait_until(lambda: read.poll() is not FetchStatus.PENDING or proxy.is_lost)
    assert read.poll() is FetchStatus.PENDING
    proxy.close()


def test_a_rank_that_is_killed_is_lost_within_moments_and_its_read_stays_pending() -> None:
    script = Path(__file__).with_name("endless_rank.py")
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        assert process.stdout is not None
        proxy = RankProxy(1, process.stdout.readline().strip(), CLUSTER_TOKEN)
        read = proxy.fetch_tokens("peer", THEIR_TABLE, MY_TABLE, range(12))
        assert process.stdout.readline() == "reading\n"
        process.kill()
    wait_until(lambda: read.poll() is not FetchStatus.PENDING or proxy.is_lost)
    assert read.poll() is FetchStatus.PENDING
    with pytest.raises(TransferFailed, match=r"rank 1 .* is lost"):
        proxy.check()
    proxy.close()


def test_a_rank_that_stands_still_for_seconds_is_not_lost() -> None:
    """Longer than a peer in another worker may: this read goes on when the rank does."""
    script = Path(__file__).with_name("endless_rank.py")
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None
        proxy = RankProxy(1, process.stdout.readline().strip(), CLUSTER_TOKEN)
        read = proxy.fetch_tokens("peer", THEIR_TABLE, MY_TABLE, range(12))
        assert process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.5 * KEEPALIVE_S)
        process.send_signal(signal.SIGCONT)
        peer = TransportEndpoint("fake", "peer", PoolDescription(12, 100), b"")
        assert proxy.connect(peer, fingerprint_of(RankLayout(1), 4)).error() is None
        assert read.poll() is FetchStatus.PENDING
        proxy.check()
        process.kill()
    proxy.close()


def test_a_port_that_is_taken_is_an_error_of_the_start(group: Group) -> None:
    port = int(group.addresses[0].rpartition(":")[2])
    pools = RankPools(fingerprint_of(RankLayout(1), 4))
    reader = LayoutReader(
        pools.memories[0], pools.fingerprint, lambda memory, serial: group.wire.attach(memory)
    )
    server = RankReadServer(
        reader, host="127.0.0.1", port=port, token=CLUSTER_TOKEN, on_fault=group.faults.append
    )
    with pytest.raises(StartupError, match="cannot listen"):
        server.start(LIMIT_S)
    server.stop(LIMIT_S)


async def test_the_transports_thread_reads_with_all_ranks(make_group: MakeGroup) -> None:
    group = make_group("loopback", RankLayout(2), RankLayout(2, 2))
    thread = TransportThread(group.reader, Health())
    thread.start()
    await thread.connect(group.owner.endpoint, group.owner.fingerprint)
    read = await thread.read(group.agent, THEIR_TABLE, MY_TABLE, range(12))
    assert (await read.ended).status is FetchStatus.DONE
    group.assert_all_arrived()
    await thread.stop(LIMIT_S)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.002)
