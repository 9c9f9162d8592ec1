"""When does the kernel give memory to a pool's blocks? Shortly before their use, on a thread of its own.

A pool is only reserved at the start: the kernel gives the memory when something is written there first,
and takes milliseconds per MiB for it, several times as long as the KV needs to be read. An engine hands
out blocks in the order of their ids until it has used all of them once. So what comes next is known:

    block    0      highest in use      provided
             |#############|~~~~~~ahead~~~~~~|............. not yet given
A pool that is never used takes no more than `AHEAD_BYTES`, and the start of a worker waits for nothing.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence

from kv_transfer.memory import MemoryKind, PoolMemory
from protocol.errors import EngineFault
from protocol.ids import BlockId

AHEAD_BYTES = 128 * 2**20
PIECE_BYTES = 4 * 2**20
"""Given at once: some milliseconds, in which other threads of the process may have to wait for a map."""
START_DELAY_S = 1.0
"""Left to the worker itself, which has other things to do when it starts, unless blocks are used before."""

MADV_POPULATE_WRITE = 23
"""Linux 5.14: gives memory without changing what is there. Python's `mmap` does not name it."""

logger = logging.getLogger(__name__)

Give = Callable[[int, int], None]
"""Give memory to so many bytes (second) from an address (first) on; raises `OSError`."""


def give(address: int, num_bytes: int) -> None:
    """Have memory under these bytes, whatever they hold. Releases the GIL. Raises `OSError`."""
    if not sys.platform.startswith("linux"):
        raise OSError(errno.ENOSYS, "only Linux gives memory ahead")
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    skipped = address % mmap.PAGESIZE
    if madvise(address - skipped, num_bytes + skipped, MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class Provision:
    """Keeps the blocks of one pool that come next provided. `use` may be called from any thread.

    It is a help and never a need: where memory cannot be given ahead, it says so once and rests.
    """

    def __init__(
        self,
        memory: PoolMemory,
        *,
        ahead_bytes: int = AHEAD_BYTES,
        start_delay_s: float = START_DELAY_S,
        give: Give = give,
    ) -> None:
        """Device memory is there from the start: then there is nothing to do."""
        self._memory = memory
        self._num_ahead = -(-ahead_bytes // memory.block_bytes)
        self._num_at_once = max(1, PIECE_BYTES // memory.block_bytes)
        self._start_delay_s = start_delay_s
        self._give = give
        self._num_provided = 0
        self._num_wanted = 0
        self._is_stopping = False
        self._is_due = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv provision", daemon=True)

    @property
    def num_provided(self) -> int:
        """Blocks from the first one on that have memory."""
        return self._num_provided

    def start(self) -> None:
        """Begin after a while, or with the first blocks that are used."""
        if self._memory.kind is MemoryKind.HOST:
            self._thread.start()

    def use(self, block_ids: Sequence[BlockId]) -> None:
        """These were handed out: provide them, unless they are, and those that come next."""
        if block_ids:
            self._want(max(block_ids) + 1)

    def stop(self, timeout_s: float) -> None:
        """Idempotent. Raises `EngineFault` when the thread hangs; the memory must stay then."""
        self._is_stopping = True
        self._is_due.set()
        if self._thread.ident is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise EngineFault(f"the kernel gave no memory to the KV pool in {timeout_s:.1f} s")

    def _want(self, num_used: int) -> None:
        num_wanted = min(num_used + self._num_ahead, self._memory.num_blocks)
        if num_wanted > self._num_wanted:  # of two at the same time one may be lost, until the next one
            self._num_wanted = num_wanted
            self._is_due.set()

    def _run(self) -> None:
        self._is_due.wait(self._start_delay_s)
        self._want(0)
        try:
            while not self._is_stopping:
                self._is_due.clear()
                while self._num_provided < self._num_wanted and not self._is_stopping:
                    self._provide_some()
                self._is_due.wait()  # ended by `stop`
        except OSError as error:
            logger.info("KV blocks get their memory when they are first written: %s", error)

    def _provide_some(self) -> None:
        first = self._num_provided
        num_blocks = min(self._num_at_once, self._num_wanted - first)
        size = self._memory.block_bytes
        self._give(self._memory.address + first * size, num_blocks * size)
        self._num_provided = first + num_blocks
