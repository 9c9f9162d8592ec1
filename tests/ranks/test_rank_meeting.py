"""What ranks tell each other at their start: anybody may read it, but nobody else can say it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.ranks.meeting import FAILED, Meeting
from engine.parallel import host_store, join_store
from protocol.errors import StartupError


@pytest.fixture
def address() -> Iterator[str]:
    store, address = host_store("127.0.0.1", limit_s=10.0)
    yield address
    del store


def meeting(address: str, rank: int, cluster: str = "this one") -> Meeting:
    return Meeting(address, rank, 2, 10.0, token=f"token of {cluster}")


def test_all_hear_what_each_has_said_and_why_one_cannot_start(address: str) -> None:
    first, second = meeting(address, 0), meeting(address, 1)
    first.say("room", "3 blocks")
    second.say("room", "two words")
    assert first.hear("room") == second.hear("room") == ["3 blocks", "two words"]
    second.fail(StartupError("no memory"))
    with pytest.raises(StartupError, match="rank 1 of 2 cannot start: no memory"):
        first.hear("more")


@pytest.mark.parametrize("key", ["room/1", FAILED])
def test_a_stranger_speaks_for_no_rank(address: str, key: str) -> None:
    first = meeting(address, 0)
    first.say("room", "3 blocks")
    join_store(address, limit_s=10.0).set(key, first._seal("room/0", "3 blocks"))  # what he could read
    with pytest.raises(StartupError, match=f"a stranger meddles with the start of these ranks: '{key}'"):
        first.hear("room")


def test_ranks_of_another_cluster_are_strangers(address: str) -> None:
    first, other = meeting(address, 0), meeting(address, 1, cluster="another")
    first.say("room")
    other.say("room")
    with pytest.raises(StartupError, match="a stranger meddles"):
        first.hear("room")
    assert meeting(address, 0).group_key("x") != meeting(address, 0, cluster="another").group_key("x")
