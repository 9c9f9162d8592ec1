"""How do messages go from the leader to the other ranks, and answers back? By collective calls, bounded.

    leader     send ---one broadcast---> receive     the others
               hear <------gather------- answer

A broadcast has a size that both sides must know before: it is what the last message needed, rounded up.
A longer message takes a second broadcast. So steps alike, as decodes are, take one.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch

from engine.parallel.communicator import Communicator
from engine.parallel.message import IntArray
from protocol.errors import EngineFault

MIN_CAPACITY = 256
"""Numbers of a broadcast, its length included: 1 KiB."""


class StepChannel:
    """One end of it. Used by the thread that uses the communicator. Raises `EngineFault` as that does."""

    def __init__(self, communicator: Communicator, for_tensors: Items[Communicator] = ()) -> None:
        """`communicator` is for tensors in host memory.

        `for_tensors` are what the rank's model uses. They end with the channel: else a rank that waits for
        another's tensors would not hear that it has failed.
        """
        self._communicator = communicator
        self._all = (communicator, *for_tensors)
        self._capacity = MIN_CAPACITY

    def send(self, message: IntArray) -> None:
        """On the leader, to all."""
        first = np.zeros(self._capacity, dtype=np.int32)
        first[0] = len(message)
        fitting = message[: self._capacity - 1]
        first[1 : 1 + len(fitting)] = fitting
        self._communicator.broadcast(torch.from_numpy(first))
        if len(fitting) < len(message):
            self._communicator.broadcast(torch.from_numpy(message[len(fitting) :].copy()))
        self._adapt(len(message))

    def receive(self) -> IntArray:
        """What the leader sent; waits for it."""
        first = np.zeros(self._capacity, dtype=np.int32)
        self._communicator.broadcast(torch.from_numpy(first))
        length = int(first[0])
        message = first[1 : 1 + length]
        if len(message) < length:
            rest = np.zeros(length - len(message), dtype=np.int32)
            self._communicator.broadcast(torch.from_numpy(rest))
            message = np.concatenate([message, rest])
        self._adapt(length)
        return message

    def answer(self, serial: int) -> None:
        """On a rank that is done with this message."""
        self._communicator.gather(torch.tensor([serial]))

    def hear(self, serial: int) -> None:
        """On the leader: wait until all are done. Raises `EngineFault` for one that did something else."""
        for rank, answer in enumerate(self._communicator.gather(torch.tensor([serial]))):
            if int(answer) != serial:
                raise EngineFault(f"rank {rank} answered message {int(answer)} when {serial} was due")

    def abort(self) -> None:
        """From any thread: whoever waits here, or at another rank, raises soon."""
        for communicator in self._all:
            communicator.abort()

    def close(self) -> None:
        for communicator in self._all:
            communicator.close()

    def _adapt(self, length: int) -> None:
        """To the next power of two above what the last message took."""
        self._capacity = max(MIN_CAPACITY, 1 << (length + 1).bit_length())
