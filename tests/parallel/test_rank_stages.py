"""Stages of a few layers each give the tokens of one rank, alone and with ranks that share layers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from cpp_variants import best_ops
from parity_kit import FEW_LAYERS, cpp_ops, generate_some, require_parity
from rank_groups import lead_ranks
from rank_threads import LIMIT_S, run_groups
from tiny_models import CPU
from tiny_shards import load_rank, write_model

from engine.ops import Ops, TorchOps
from engine.parallel import RankGroups
from engine.parallel.channel import StepChannel
from engine.parallel.follower import Follower
from engine.parallel.leader import LeaderRunner
from engine.weights import ModelFolder
from protocol.errors import EngineFault
from protocol.rank_layout import RankLayout

HookOf = Callable[[int, LeaderRunner], Callable[[], None] | None]
TWO_STAGES, TWO_BY_TWO = RankLayout(1, 2), RankLayout(2, 2)


@pytest.mark.parametrize("layout", [TWO_STAGES, TWO_BY_TWO], ids=["two_stages", "two_by_two"])
@pytest.mark.parametrize("kind", ["llama_biased", "qwen2", "qwen3_tied", "one_kv_head"])
def test_stages_give_the_tokens_of_one_rank(kind: str, layout: RankLayout, tmp_path: Path) -> None:
    require_parity(write_model(kind, tmp_path, **FEW_LAYERS), layout, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ops", ["torch", "cpp"])
def test_stages_that_share_no_layer_change_no_bit(ops: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_model("qwen2", tmp_path, **FEW_LAYERS)
    if ops == "cpp":
        best_ops(dtype)  # skips where there are none

    def make_ops() -> Ops:
        return cpp_ops(dtype) if ops == "cpp" else TorchOps(CPU, dtype)

    parts = {"dtype": dtype, "make_ops": make_ops}
    alone = generate_some(load_rank(folder, None, tmp_path, **parts).runner)
    assert lead_ranks(folder, TWO_STAGES, tmp_path, generate_some, **parts) == alone


def test_layers_keep_their_windows_in_uneven_stages(tmp_path: Path) -> None:
    """Five layers in three stages; those from the second on see few positions, if the model says so."""
    folder = write_model("qwen2_sliding", tmp_path, num_hidden_layers=5, max_window_layers=3)
    require_parity(folder, RankLayout(1, 3), tmp_path)


@dataclass
class StepHook:
    """A partition that does something when its rank's pass begins for the third time."""

    partition: Any
    at_third: Callable[[], None]
    num_passes: int = 0
    is_whole: bool = False

    def embed(self, embedding: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        self.num_passes += 1
        if self.num_passes == 3:
            self.at_third()
        return self.partition.embed(embedding, token_ids)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.partition, name)


def run_until_it_fails(folder: ModelFolder, cache_dir: Path, hook_of: HookOf) -> list[BaseException]:
    """What each rank of two by two raises in the end. `hook_of(rank, leader)`: what happens there."""

    def rank(groups: RankGroups) -> BaseException:
        mine = load_rank(folder, groups, cache_dir)
        channel = StepChannel(groups.steps, groups.for_tensors)
        leader = LeaderRunner(mine.runner, channel, mine.kv_cache.block_size)
        if (hook := hook_of(groups.rank, leader)) is not None:
            mine.model.partition = StepHook(mine.model.partition, hook)
        work = Follower(mine.forward, channel).run if groups.rank > 0 else lambda: generate_some(leader)
        with pytest.raises((EngineFault, ArithmeticError)) as caught:
            work()
        return caught.value

    return run_groups(TWO_BY_TWO, rank)


@pytest.mark.parametrize("failing", range(4))
def test_a_rank_that_fails_in_any_stage_ends_all_long_before_the_limit(
    failing: int, tmp_path: Path
) -> None:
    folder = write_model("qwen2", tmp_path, **FEW_LAYERS)

    def fail() -> None:
        raise ArithmeticError("broken")

    started_s = time.monotonic()
    faults = run_until_it_fails(folder, tmp_path, lambda rank, _: fail if rank == failing else None)
    assert time.monotonic() - started_s < LIMIT_S / 2
    assert isinstance(faults.pop(failing), ArithmeticError)
    assert [type(fault) for fault in faults] == [EngineFault] * 3


def test_a_leader_that_is_aborted_waits_for_no_stage_that_hangs(tmp_path: Path) -> None:
    folder = write_model("qwen2", tmp_path, **FEW_LAYERS)
    leaders: SimpleQueue[LeaderRunner] = SimpleQueue()

    def hang() -> None:
        leaders.get(timeout=LIMIT_S).abort()

    def hook_of(rank: int, leader: LeaderRunner) -> Callable[[], None] | None:
        if rank == 0:
            leaders.put(leader)
        return hang if rank == 3 else None

    faults = run_until_it_fails(folder, tmp_path, hook_of)
    assert [type(fault) for fault in faults] == [EngineFault] * 4
