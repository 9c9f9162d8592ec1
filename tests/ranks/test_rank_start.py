"""The ranks of a worker meet, agree and end together; what one cannot do is said by all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny_clusters import tiny_config, tiny_model
from tiny_models import VOCAB_SIZE

from cluster.compose import open_model
from cluster.config import ClusterConfig
from cluster.engine_parts import EngineParts, build_engine
from cluster.ranks import ThreadLauncher
from cluster.ranks.group import leading
from cluster.ranks.launch import RankHandle
from cluster.ranks.spec import RankSpec
from cluster.verification import greedy_cases
from cluster.verification.colocated import answer_colocated
from engine.parallel.leader import LeaderRunner
from kv_transfer import LoopbackNetwork
from protocol.errors import StartupError
from protocol.ids import Role, WorkerId, WorkerIdentity

TEXT = [3 + (i * i + 7 * i) % (VOCAB_SIZE - 3) for i in range(997)]
IDENTITY = WorkerIdentity(WorkerId("prefill-0"), "1")


class RecordingLauncher(ThreadLauncher):
    """Followers as threads, which a test can look at."""

    def __init__(self) -> None:
        super().__init__(LoopbackNetwork())
        self.handles: list[RankHandle] = []

    def launch(self, spec: RankSpec) -> RankHandle:
        self.handles.append(super().launch(spec))
        return self.handles[-1]


def rank_config(model: Path, num_ranks: int, **changes: Any) -> ClusterConfig:
    return tiny_config(
        model, kv_transfer__transport="loopback", prefill__tensor_parallel_size=num_ranks, **changes
    )


@contextmanager
def led(config: ClusterConfig, launcher: ThreadLauncher) -> Iterator[EngineParts]:
    """A worker's engine with all its ranks, which are told to stop at the end."""
    with leading(config, Role.PREFILL, IDENTITY, "token", launcher) as team:
        parts = build_engine(config, config.prefill, open_model(config), team=team)
        yield parts
        assert isinstance(parts.executor, LeaderRunner)
        parts.executor.stop()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_an_engine_of_several_ranks_gives_the_tokens_of_one(model: Path, num_ranks: int) -> None:
    config, launcher = rank_config(model, num_ranks), RecordingLauncher()
    alone = build_engine(config, config.prefill, open_model(config))
    cases = greedy_cases(TEXT, num_cases=5, max_tokens=8, limit=alone.scheduler.max_model_len)
    with led(config, launcher) as parts:
        assert parts.fingerprint.num_kv_heads == alone.fingerprint.num_kv_heads
        found = answer_colocated(parts.make_core(), cases)
    assert found == answer_colocated(alone.make_core(), cases)
    for handle in launcher.handles:
        handle.end(30)
        assert not handle.alive


def test_all_ranks_use_as_many_blocks_as_the_least_of_them_holds(model: Path) -> None:
    """Three KV heads on two ranks: the first rank's blocks are twice as large."""
    uneven = tiny_model("llama", model.parent, num_key_value_heads=3)
    sizes = {"prefill__num_blocks": None, "prefill__kv_cache_memory": "1MiB"}
    config = rank_config(uneven, 2, **sizes)
    with led(config, RecordingLauncher()) as parts:
        assert parts.kv_cache.num_blocks == 2**20 // parts.kv_cache.block_bytes
        assert parts.scheduler.num_blocks == parts.kv_cache.num_blocks


class OtherModelLauncher(RecordingLauncher):
    """Its followers find no model."""

    def launch(self, spec: RankSpec) -> RankHandle:
        config = spec.cluster_config().model_copy(update={"model": "/no/such/model"})
        return super().launch(
            RankSpec(
                spec.role,
                spec.rank,
                config.model_dump_json(),
                spec.token,
                spec.identity,
                spec.store_address,
                spec.host,
            )
        )


def test_a_follower_that_cannot_start_ends_the_start_and_the_leader_says_why(model: Path) -> None:
    launcher = OtherModelLauncher()
    with (
        pytest.raises(StartupError, match=r"rank 1 of 2 cannot start: .*/no/such/model"),
        led(rank_config(model, 2), launcher),
    ):
        pass
    assert not launcher.handles[0].alive


def test_a_leader_that_cannot_start_takes_its_followers_along(model: Path) -> None:
    launcher = RecordingLauncher()
    config = rank_config(model, 2)
    with (
        pytest.raises(ZeroDivisionError),
        leading(config, Role.PREFILL, IDENTITY, "token", launcher),
    ):
        raise ZeroDivisionError("this machine is out of numbers")
    assert not launcher.handles[0].alive


class SilentLauncher(ThreadLauncher):
    """Its followers end without a word, or never come."""

    def __init__(self, *, alive: bool) -> None:
        super().__init__()
        self._alive = alive

    def launch(self, spec: RankSpec) -> RankHandle:
        return SilentRank(alive=self._alive)


class SilentRank:
    def __init__(self, *, alive: bool) -> None:
        self.alive = alive

    def end(self, grace_s: float) -> None:
        """It was never there."""


@pytest.mark.parametrize(
    ("alive", "says"), [(False, "rank 1 of 2 ended while it started"), (True, "not ready after 1 s")]
)
def test_the_wait_for_a_follower_that_is_lost_is_bounded(model: Path, alive: bool, says: str) -> None:
    config = rank_config(model, 2, ranks__start_timeout_s=1)
    with pytest.raises(StartupError, match=says), led(config, SilentLauncher(alive=alive)):
        pass
