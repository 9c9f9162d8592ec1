"""Owners of KV blocks in processes of their own, over Gloo: to be frozen, killed, or stopped halfway."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

from transport_kit import filled_pool, new_agent_name

from kv_transfer.pairs.choose import GLOO, make_fabric
from kv_transfer.pairs.group import Fabric, Pair
from kv_transfer.pairs.owner import Owner
from protocol.handoff import TransportEndpoint

LIMIT_S = 90.0
"""For a start, too: the first one loads torch."""
HOST = "127.0.0.1"


def forks() -> ForkServerContext:
    """Processes that have torch from their start: it takes seconds to load, and once is enough."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kv_transfer.pairs", "numpy"])
    return context


class OwnerProcess:
    """Owns `num_blocks` blocks of `block_bytes`, filled from `salt`."""

    def __init__(
        self,
        context: ForkServerContext,
        num_blocks: int,
        block_bytes: int,
        salt: int,
        *,
        num_messages: int | None = None,
    ) -> None:
        """After so many messages it freezes itself."""
        mine, theirs = context.Pipe()
        self._line: Connection = mine
        args = (theirs, (num_blocks, block_bytes, salt), new_agent_name(), num_messages)
        self._process = context.Process(target=_own, args=args, daemon=True)
        self._process.start()
        theirs.close()
        assert mine.poll(LIMIT_S), "the owner did not start"
        self.endpoint: TransportEndpoint = mine.recv()

    @property
    def agent(self) -> str:
        return self.endpoint.agent

    def freeze(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(LIMIT_S)
        self._line.close()

    @property
    def is_frozen(self) -> bool:
        """By itself or by `freeze`."""
        with open(f"/proc/{self._pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid


def _own(line: Connection, pool: tuple[int, int, int], agent: str, num_messages: int | None) -> None:
    memory = filled_pool(*pool)
    fabric = make_fabric(GLOO, memory, HOST)
    if num_messages is not None:
        fabric = FreezingFabric(fabric, num_messages)
    owner = Owner(fabric, memory.description, agent, HOST)
    line.send(TransportEndpoint(GLOO, agent, memory.description, owner.metadata.to_bytes()))
    line.poll(None)  # until the test's process has gone


class FreezingFabric:
    """Its process freezes when so many messages have arrived, and there are more."""

    def __init__(self, fabric: Fabric, num_messages: int) -> None:
        self._fabric = fabric
        self._num_messages = num_messages
        self.pool, self.cut = fabric.pool, fabric.cut

    def pair(self, channel: Any, rank: int) -> Pair:
        return FreezingPair(self._fabric.pair(channel, rank), self._num_messages)

    def close(self) -> None:
        self._fabric.close()


class FreezingPair:
    """Sends one message after the other, so that it is known how many have arrived."""

    def __init__(self, pair: Pair, num_messages: int) -> None:
        self._pair = pair
        self._num_left = num_messages

    def send(self, part: Any) -> Any:
        if not self._num_left:
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(LIMIT_S)  # this thread may go on for a moment
        self._num_left -= 1
        work = self._pair.send(part)
        self._pair.wait(work)
        return work

    def recv(self, part: Any) -> Any:
        return self._pair.recv(part)

    def wait(self, work: Any) -> None:
        """It has been waited for."""

    def settle(self) -> None:
        self._pair.settle()

    def abort(self) -> None:
        self._pair.abort()
