"""What can be set about a decode worker?"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from protocol.errors import StartupError

READ_SHARE = 1 / 3
"""Of a limit, for one read: what is left of it is for another try elsewhere."""


class OnKvFailure(StrEnum):
    """What becomes of a request whose KV could not be taken over."""

    RECOMPUTE = "recompute"
    """Compute it here: the client waits longer and sees no error."""
    FAIL = "fail"
    """Report the error; the router decides."""


@dataclass(frozen=True, slots=True)
class DecodeWorkerConfig:
    """Validated at construction. Raises `StartupError`."""

    on_kv_failure: OnKvFailure = OnKvFailure.RECOMPUTE
    fetch_limit_s: float = 30.0
    """A read that has not ended by then never will: the worker reports itself unfit and is replaced."""
    connect_timeout_s: float = 10.0
    """How long the handshake with an owner may take, transport included."""
    owner_timeout_s: float = 3.0
    """How long an owner may take to answer one call."""
    release_attempts: int = 3
    """How often an owner that does not answer is asked for its verdict."""
    forget_peer_after_s: float = 10.0
    """How long an owner may be missing in the directory before its connection is dropped."""
    credit_reserve: float = 0.02
    """Share of the pool that is not granted to routers: running sequences grow into it."""

    def __post_init__(self) -> None:
        for name in (
            "fetch_limit_s",
            "connect_timeout_s",
            "owner_timeout_s",
            "release_attempts",
            "forget_peer_after_s",
        ):
            if not getattr(self, name) > 0:
                raise StartupError(f"{name} is {getattr(self, name)}: set it to more than 0")
        if not 0 <= self.credit_reserve < 1:
            raise StartupError(f"credit_reserve is {self.credit_reserve}: set it to 0 or more and under 1")

    def read_limit_s(self, deadline_s: float) -> float:
        """How long a request with so much time left waits for one read; the read itself may go on."""
        return min(self.fetch_limit_s, deadline_s) * READ_SHARE
