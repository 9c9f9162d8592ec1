"""The seam between the ranks of one worker: what they can do together, and how it ends when one is gone."""

from __future__ import annotations

from typing import Protocol

import torch


class Communicator(Protocol):
    """One rank's place in a group. All ranks call the same operations in the same order, each on a thread.

    Every operation is bounded: when a rank is gone, or does not come within the group's limit, the others'
    calls raise `EngineFault`, and so does every later one. Tensors are contiguous, and of one shape and
    type on all ranks.
    """

    @property
    def rank(self) -> int:
        """From 0, which is the leader."""

    @property
    def num_ranks(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on each of them; may overwrite `x`."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[num_ranks, *x.shape]: everybody's, on each rank."""

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's, in the order of ranks, on rank 0; nothing on the others."""

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite `x` with that of rank 0."""

    def abort(self) -> None:
        """End the group from any thread: what waits there raises within a second. Idempotent."""

    def close(self) -> None:
        """Leave the group, by the thread that uses it: the others' calls raise from now on. Idempotent."""


class SoloCommunicator:
    """A group of one."""

    rank = 0
    num_ranks = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x]

    def broadcast(self, x: torch.Tensor) -> None:
        """Nobody else is there."""

    def abort(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is held."""
