"""Communicators: the same sums on every rank, and an end within bounds when one is gone."""

from __future__ import annotations

import socket
import struct
import threading

import pytest
import torch
from rank_threads import run_ranks
from torch.distributed import HashStore

from engine.parallel import Communicator, SoloCommunicator, connect, host_store, join_store
from protocol.errors import EngineFault, StartupError

CPU = torch.device("cpu")


@pytest.fixture(params=["tcp", "gloo"])
def kind(request: pytest.FixtureRequest) -> str:
    """All that join ranks on CPUs do the same."""
    name: str = request.param
    return name


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_taken_in_the_order_of_ranks_for_every_number_of_rows(
    kind: str, num_ranks: int, dtype: torch.dtype
) -> None:
    parts = torch.randn(num_ranks, 37, 24, generator=torch.Generator().manual_seed(3)).to(dtype)

    def work(communicator: Communicator) -> list[torch.Tensor]:
        mine = parts[communicator.rank]
        return [communicator.all_reduce(mine[:rows].clone()) for rows in (1, 2, 37)]

    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    for sums in run_ranks(num_ranks, work, kind=kind):
        for found in sums:
            assert found.dtype is dtype
            assert torch.equal(found, expected[: len(found)].to(dtype))


def test_all_gather_gather_and_broadcast_follow_the_order_of_ranks(kind: str) -> None:
    def work(communicator: Communicator) -> tuple[list[int], list[int], list[int]]:
        mine = torch.tensor([communicator.rank, 7], dtype=torch.int32)
        everybody = communicator.all_gather(mine)[:, 0].tolist()
        gathered = [int(x[0]) for x in communicator.gather(mine)]
        told = torch.tensor([communicator.rank + 5])
        communicator.broadcast(told)
        return everybody, gathered, told.tolist()

    first, *others = run_ranks(3, work, kind=kind)
    assert first == ([0, 1, 2], [0, 1, 2], [5])
    assert others == [([0, 1, 2], [], [5])] * 2


def test_calls_of_the_others_fail_once_a_rank_has_left(kind: str) -> None:
    def work(communicator: Communicator) -> str:
        if communicator.rank == 1:
            return ""
        with pytest.raises(EngineFault, match=r"rank \d of 3 lost its group: all_gather failed") as caught:
            communicator.all_gather(torch.zeros(4))
        with pytest.raises(EngineFault, match="the group has ended"):
            communicator.broadcast(torch.zeros(4))
        return caught.value.message

    assert all(run_ranks(3, work, kind=kind)[::2])


def test_a_rank_that_does_not_come_is_waited_for_within_the_limit(kind: str) -> None:
    is_over = threading.Event()

    def work(communicator: Communicator) -> None:
        if communicator.rank == 1:
            assert is_over.wait(60)
            return
        with pytest.raises(EngineFault, match=r"did not come within 0.5 s"):
            communicator.all_gather(torch.zeros(4))
        is_over.set()

    run_ranks(2, work, limit_s=0.5, kind=kind)


def test_abort_from_another_thread_ends_a_waiting_call(kind: str) -> None:
    is_over = threading.Event()

    def work(communicator: Communicator) -> None:
        if communicator.rank == 1:
            assert is_over.wait(60)
            return
        threading.Timer(0.1, communicator.abort).start()
        with pytest.raises(EngineFault, match="aborted"):
            communicator.all_gather(torch.zeros(4))
        is_over.set()

    run_ranks(2, work, limit_s=20, kind=kind)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.bfloat16])
def test_long_and_empty_tensors_of_any_type_pass(kind: str, dtype: torch.dtype) -> None:
    """All send much more than a connection holds, and none waits for another to take it."""

    def work(communicator: Communicator) -> list[list[int]]:
        found = []
        for length in (3_000_000, 1, 0):
            x = torch.full((length,), communicator.rank + 1, dtype=dtype)
            everybody = communicator.all_gather(x)
            assert everybody.shape == (3, length)
            told = x.clone()
            communicator.broadcast(told)
            found.append([*everybody[:, -1:].flatten().int().tolist(), *told[-1:].int().tolist()])
        return found

    assert run_ranks(3, work, kind=kind) == [[[1, 2, 3, 1], [1, 2, 3, 1], []]] * 3


def test_a_stranger_at_a_ranks_door_is_not_let_in() -> None:
    """He comes before the rank that is awaited, says something of the right length, and is hung up on."""
    store = HashStore()
    found: list[Communicator] = []

    def join(rank: int) -> None:
        found.append(connect("tcp", store, rank, 2, device=CPU, limit_s=30))

    first = threading.Thread(target=join, args=(0,))
    first.start()
    store.wait(["address 0"])
    port, host = store.get("address 0").decode().split()
    with socket.create_connection((host, int(port)), timeout=30) as stranger:
        stranger.sendall(bytes(32) + (1).to_bytes(4, "little"))
        assert stranger.recv(1) == b""
    join(1)
    first.join(30)
    assert sorted(communicator.rank for communicator in found) == [0, 1]
    for communicator in found:
        communicator.close()


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_stranger_who_says_nothing_or_hangs_up_does_not_end_the_start(*, is_silent: bool) -> None:
    """As those do who look which ports are open."""
    store = HashStore()
    found: list[Communicator] = []

    def join(rank: int) -> None:
        found.append(connect("tcp", store, rank, 2, device=CPU, limit_s=30))

    first = threading.Thread(target=join, args=(0,))
    first.start()
    store.wait(["address 0"])
    port, host = store.get("address 0").decode().split()
    stranger = socket.create_connection((host, int(port)), timeout=30)
    if not is_silent:  # not politely, but with a reset
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.close()
    join(1)
    first.join(30)
    stranger.close()
    assert sorted(communicator.rank for communicator in found) == [0, 1]
    for communicator in found:
        communicator.close()


def test_a_group_that_never_meets_is_a_fault_within_the_limit(kind: str) -> None:
    with pytest.raises(EngineFault, match="rank 0 of 2 lost its group: start failed"):
        connect(kind, HashStore(), 0, 2, device=CPU, limit_s=0.2)


def test_ranks_meet_through_the_leaders_store() -> None:
    store, address = host_store("127.0.0.1", limit_s=20)
    store.set("word", "here")
    assert join_store(address, limit_s=20).get("word") == b"here"
    assert address.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("kind", "num_ranks", "device", "why"),
    [
        ("mpi", 2, "cpu", "there is no communicator 'mpi'"),
        ("solo", 2, "cpu", "2 ranks need a communicator"),
        ("nccl", 2, "cpu", "nccl does not reach tensors on cpu"),
        ("gloo", 2, "cuda", "gloo does not reach tensors on cuda"),
        ("tcp", 2, "cuda", "tcp does not reach tensors on cuda"),
    ],
)
def test_impossible_communicators_are_refused(kind: str, num_ranks: int, device: str, why: str) -> None:
    with pytest.raises(StartupError, match=why):
        connect(kind, HashStore(), 0, num_ranks, device=torch.device(device))


def test_one_rank_needs_nobody() -> None:
    solo = connect("tcp", HashStore(), 0, 1, device=CPU)
    assert isinstance(solo, SoloCommunicator)
    x = torch.ones(2, 3)
    assert solo.all_reduce(x) is x
    assert solo.all_gather(x).shape == (1, 2, 3)
