"""Memory is given to blocks before they are used: as many as agreed, in order, and never more."""

from __future__ import annotations

import errno
import mmap
import sys
import threading
import time
from collections.abc import Callable

import pytest

from kv_transfer import MemoryKind, PoolMemory, Provision
from kv_transfer.provision import give
from protocol.errors import EngineFault
from protocol.ids import BlockId

BLOCK_BYTES = 2**20
WAIT_LIMIT_S = 20.0


class Giver:
    """Notes what it is asked for, instead of the kernel."""

    def __init__(self, error: OSError | None = None) -> None:
        self.spans: list[tuple[int, int]] = []
        self.was_asked = threading.Event()
        self._error = error

    def __call__(self, address: int, num_bytes: int) -> None:
        self.spans.append((address, num_bytes))
        self.was_asked.set()
        if self._error is not None:
            raise self._error


def pool(num_blocks: int, kind: MemoryKind = MemoryKind.HOST) -> PoolMemory:
    return PoolMemory(2**40, num_blocks, BLOCK_BYTES, kind)  # nobody touches it


def until(is_so: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + WAIT_LIMIT_S
    while not is_so():
        assert time.monotonic() < limit_s
        time.sleep(0.001)


def test_pool_that_is_not_used_gets_its_first_blocks_only() -> None:
    giver = Giver()
    provision = Provision(pool(100), ahead_bytes=10 * BLOCK_BYTES, start_delay_s=0.0, give=giver)
    provision.start()
    until(lambda: provision.num_provided == 10)
    provision.stop(WAIT_LIMIT_S)
    assert provision.num_provided == 10


def test_blocks_that_are_used_are_followed_in_order_without_a_gap() -> None:
    giver = Giver()
    provision = Provision(pool(100), ahead_bytes=10 * BLOCK_BYTES, give=giver)
    provision.start()
    for top in (3, 30, 7):
        provision.use([BlockId(1), BlockId(top)])
    until(lambda: provision.num_provided == 41)
    provision.stop(WAIT_LIMIT_S)
    address = 2**40
    for start, num_bytes in giver.spans:
        assert start == address
        address += num_bytes
    assert address == 2**40 + 41 * BLOCK_BYTES


def test_the_end_of_the_pool_is_the_end() -> None:
    provision = Provision(pool(12), ahead_bytes=100 * BLOCK_BYTES, give=Giver())
    provision.start()
    provision.use([BlockId(11)])
    until(lambda: provision.num_provided == 12)
    provision.stop(WAIT_LIMIT_S)


def test_a_worker_that_just_starts_is_left_alone() -> None:
    giver = Giver()
    provision = Provision(pool(100), start_delay_s=WAIT_LIMIT_S, give=giver)
    provision.start()
    provision.use([])
    assert not giver.was_asked.is_set()
    provision.stop(WAIT_LIMIT_S)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOMEM])
def test_a_kernel_that_cannot_is_asked_once(code: int) -> None:
    giver = Giver(OSError(code, "no"))
    provision = Provision(pool(100), give=giver)
    provision.start()
    provision.use([BlockId(1)])
    assert giver.was_asked.wait(WAIT_LIMIT_S)
    provision.use([BlockId(50)])
    provision.stop(WAIT_LIMIT_S)
    assert len(giver.spans) == 1
    assert provision.num_provided == 0


def test_device_memory_is_there_already() -> None:
    giver = Giver()
    provision = Provision(pool(100, MemoryKind.DEVICE), start_delay_s=0.0, give=giver)
    provision.start()
    provision.use([BlockId(1)])
    provision.stop(WAIT_LIMIT_S)
    assert not giver.spans


def test_a_kernel_that_hangs_is_told() -> None:
    is_over = threading.Event()
    giver = Giver()

    def hang(address: int, num_bytes: int) -> None:
        giver(address, num_bytes)
        is_over.wait(WAIT_LIMIT_S)

    provision = Provision(pool(100), start_delay_s=0.0, give=hang)
    provision.start()
    assert giver.was_asked.wait(WAIT_LIMIT_S)
    with pytest.raises(EngineFault, match="KV pool"):
        provision.stop(0.01)
    is_over.set()
    provision.stop(WAIT_LIMIT_S)


def test_it_may_end_before_it_began() -> None:
    provision = Provision(pool(10))
    provision.stop(0.0)
    provision.stop(0.0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the call is Linux's")
def test_the_kernel_gives_memory_and_changes_nothing() -> None:
    """Also where the bytes do not begin with a memory page."""
    memory = PoolMemory.allocate(4, 3 * mmap.PAGESIZE + 100)
    memory.block_view(BlockId(1))[:] = b"\x07" * memory.block_bytes
    try:
        give(memory.block_address(BlockId(1)), 2 * memory.block_bytes)
    except OSError as error:
        pytest.skip(f"this kernel gives no memory ahead: {error}")
    assert bytes(memory.block_view(BlockId(1))) == b"\x07" * memory.block_bytes
    assert bytes(memory.block_view(BlockId(2))) == bytes(memory.block_bytes)
    with pytest.raises(OSError, match="memory"):
        give(mmap.PAGESIZE, mmap.PAGESIZE)
