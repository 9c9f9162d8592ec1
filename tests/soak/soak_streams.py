"""How does a soak get at the streams between its router and each of the workers? By a `Dial` of its own."""

from __future__ import annotations

import grpc

from protocol.errors import WorkerUnavailable
from rpc import CallFaultKind, CallFaults, FaultyDial

SERVE = "Serve"


class RouterStreams:
    """Opens a router's channels, and lets the next message to or from a worker go wrong."""

    def __init__(self) -> None:
        self.dials: dict[str, FaultyDial] = {}
        """By address of the worker."""

    def __call__(self, address: str, token: str) -> grpc.aio.Channel:
        dial = self.dials[address] = FaultyDial(CallFaults(), address)
        return dial(address, token)

    def script(self, address: str, kind: CallFaultKind, delay_s: float, *, is_received: bool) -> None:
        """Raises `WorkerUnavailable` when the router does not know the worker of this address yet."""
        dial = self.dials.get(address)
        if dial is None:
            raise WorkerUnavailable(f"the router has no channel to {address} yet")
        plans = dial.received if is_received else dial.plans
        plans[SERVE].script(kind, delay_s)
