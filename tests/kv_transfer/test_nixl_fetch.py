"""When is a NIXL read over? Only when nothing can write into its blocks any more. Without NIXL."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from transport_kit import new_agent_name

from kv_transfer.nixl import NIXL, NixlFetch, NixlLibrary
from kv_transfer.peers import PeerTable
from protocol.errors import TransferFailed
from protocol.handoff import PoolDescription, TransportEndpoint
from protocol.ports import FetchStatus


class FakeAgent:
    """Answers as it is told; a step in `broken` raises as NIXL's bindings do."""

    def __init__(self, *broken: str) -> None:
        self.broken = set(broken)
        self.is_done = False
        self.num_releases = 0

    def post(self, handle: int) -> bool:
        return self._answer("post")

    def check(self, handle: int) -> bool:
        return self._answer("check")

    def release(self, handle: int) -> None:
        self.num_releases += 1
        self._answer("release")

    def _answer(self, step: str) -> bool:
        if step in self.broken:
            raise OSError(f"{step} went wrong")
        return self.is_done


def endpoint() -> TransportEndpoint:
    return TransportEndpoint(NIXL, new_agent_name(), PoolDescription(4, 64), b"")


def start(agent: Any) -> tuple[NixlFetch, PeerTable]:
    peers, owner = PeerTable(endpoint()), endpoint()
    peers.add(peers.connection(owner, None))
    library = NixlLibrary(bindings=None, errors=(OSError,))
    return NixlFetch(library, agent, 7, name=owner.agent, num_bytes=64, peers=peers), peers


def test_failed_read_ends_once_its_request_is_given_back() -> None:
    agent = FakeAgent()
    fetch, peers = start(agent)
    assert fetch.poll() is FetchStatus.PENDING
    agent.broken.add("check")
    assert fetch.poll() is FetchStatus.FAILED
    fetch.release()
    assert agent.num_releases == 1
    peers.close()


@pytest.mark.parametrize("failing_step", ["post", "check"])
def test_failed_read_that_cannot_be_cancelled_stays_pending_for_ever(
    failing_step: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A terminal state would give blocks back into which NIXL may still write."""
    agent = FakeAgent(failing_step, "release")
    with caplog.at_level(logging.WARNING):
        fetch, peers = start(agent)
        assert {fetch.poll() for _ in range(50)} == {FetchStatus.PENDING}
        agent.broken.clear()
        agent.is_done = True
        assert fetch.poll() is FetchStatus.PENDING
    assert agent.num_releases == 1
    assert len(caplog.records) == 2
    with pytest.raises(TransferFailed, match="pending"):
        fetch.release()
    with pytest.raises(TransferFailed, match="pending"):
        peers.close()


def test_read_that_is_done_ends_though_its_request_cannot_be_given_back() -> None:
    agent = FakeAgent("release")
    agent.is_done = True
    fetch, peers = start(agent)
    assert fetch.poll() is FetchStatus.DONE
    peers.close()
