"""A soak's grip on the streams between its router and the workers."""

from __future__ import annotations

import pytest
from soak_streams import SERVE, RouterStreams

from protocol.errors import WorkerUnavailable
from rpc import CallFaultKind


async def test_a_fault_is_one_worker_s_and_one_direction_s() -> None:
    streams = RouterStreams()
    channels = [streams(address, "secret") for address in ("127.0.0.1:1", "127.0.0.1:2")]
    streams.script("127.0.0.1:1", CallFaultKind.DELAY, 0.5, is_received=True)
    hit, other = streams.dials.values()
    assert other.plans[SERVE].take() is other.received[SERVE].take() is hit.plans[SERVE].take() is None
    fault = hit.received[SERVE].take()
    assert fault is not None
    assert (fault.kind, fault.delay_s) == (CallFaultKind.DELAY, 0.5)
    assert hit.received[SERVE].take() is None
    for channel in channels:
        await channel.close()


def test_a_worker_that_the_router_does_not_know_yet_cannot_be_hit() -> None:
    with pytest.raises(WorkerUnavailable, match="the router has no channel to"):
        RouterStreams().script("127.0.0.1:1", CallFaultKind.DROP, 0.0, is_received=False)
