"""What carries the bytes? A torch.distributed process group of two: Gloo for host memory, NCCL for GPUs.

Groups are objects, and none is the process's global one. What they must tell each other before they are
connected goes over the channel of the two, and so only to whoever knows the owner's secret (`store`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from kv_transfer.pairs.channel import Channel
from kv_transfer.pairs.messages import Cut
from protocol.errors import TransferFailed

OWNER, READER = 0, 1
"""The ranks of the two."""
MESSAGE_LIMIT_S = 30.0
"""One message may take so long, not a read: a slow link is no dead one."""


class Pair(Protocol):
    """One side's end of a group of two. One thread uses it, any may `abort` it.

    All of it raises `TransferFailed` once the other side, or `abort`, has ended it.
    """

    def send(self, part: torch.Tensor) -> Any:
        """Begin; `part` is not to be written before `wait` has returned."""

    def recv(self, part: torch.Tensor) -> Any:
        """Begin; `part` may be written until `wait` has returned, or what this returned is dropped."""

    def wait(self, work: Any) -> None:
        """Until the bytes are where they belong."""

    def settle(self) -> None:
        """Until what was copied after the last `wait` is where it belongs, too."""

    def abort(self) -> None:
        """Idempotent: who waits is told. Nothing is written by this group any more."""


class Fabric(Protocol):
    """A kind of groups, over one pool."""

    pool: torch.Tensor  # [num_bytes], uint8: the pool itself
    cut: Cut

    def pair(self, channel: Channel, rank: int) -> Pair:
        """Waits for the other side, within bounds. Raises `TransferFailed`."""

    def close(self) -> None:
        """Idempotent. What all groups share goes with the last of them."""


def started(start: Callable[[], Any]) -> Any:
    """The group that it makes. Raises `TransferFailed`."""
    try:
        return start()
    except RuntimeError as error:
        raise TransferFailed(f"the two do not come together: {error}") from error


def translated(call: Callable[[], Any]) -> Any:
    """What a call of a group gives. Raises `TransferFailed` for what torch raises."""
    try:
        return call()
    except RuntimeError as error:
        raise TransferFailed(f"the group is lost: {error}") from error
