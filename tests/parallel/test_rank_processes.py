"""Ranks in processes: the tokens of one, and an end for all when one of them is killed."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue

import pytest
from rank_processes import LIMIT_S, leading
from tiny_models import BlockDealer, generate, make_prompt
from tiny_shards import load_rank, write_model

from engine import (
    AddSequence,
    EngineCore,
    EngineThread,
    Event,
    SchedulerConfig,
    SequenceFailed,
    TokensSampled,
)
from engine.parallel.leader import LeaderRunner
from engine.weights import ModelFolder
from protocol.errors import EngineFault
from protocol.generation import SamplingParams
from protocol.ids import SequenceId
from protocol.rank_layout import RankLayout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return write_model("qwen2", tmp_path_factory.mktemp("model"), num_hidden_layers=3)


@pytest.mark.parametrize("layout", [RankLayout(4), RankLayout(2, 2)], ids=["one_stage", "two_stages"])
def test_processes_give_the_tokens_of_one_and_stop_in_peace(
    folder: ModelFolder, layout: RankLayout, tmp_path: Path
) -> None:
    prompt = make_prompt(20)
    alone = load_rank(folder, None, tmp_path).runner
    expected = generate(alone, [BlockDealer().sequence(prompt, 6)])[0]
    with leading(folder, layout, tmp_path) as (leader, others):
        leader.warm_up()
        found = generate(leader, [BlockDealer().sequence(prompt, 6)], chunk_size=16)[0]
        leader.stop()
        leader.stop()
    assert [token.token_id for token in found] == [token.token_id for token in expected]
    assert [process.exitcode for process in others] == [0] * (layout.num_ranks - 1)


def start_engine(leader: LeaderRunner) -> tuple[EngineThread, SimpleQueue[list[Event]]]:
    events: SimpleQueue[list[Event]] = SimpleQueue()
    config = SchedulerConfig(num_blocks=100, max_model_len=500, max_num_seqs=4)
    core = EngineCore(config, leader, frozenset(), lambda: 0.0)
    thread = EngineThread(core, events.put, "leader", idle_wait_s=0.05, keep_alive=leader.keep_alive)
    thread.start()
    return thread, events


@pytest.mark.parametrize("layout", [RankLayout(3), RankLayout(1, 3)], ids=["one_stage", "stages"])
def test_a_killed_follower_ends_the_engine_and_the_other_ranks(
    folder: ModelFolder, layout: RankLayout, tmp_path: Path
) -> None:
    with leading(folder, layout, tmp_path) as (leader, others):
        thread, events = start_engine(leader)
        sampling = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
        thread.post(AddSequence(SequenceId("s"), tuple(make_prompt(20)), sampling))
        while not any(isinstance(event, TokensSampled) for event in events.get(timeout=LIMIT_S)):
            pass
        others[0].kill()
        told: list[Event] = []
        while not any(isinstance(event, SequenceFailed) for event in told):
            told = events.get(timeout=LIMIT_S)
        (failure,) = [event for event in told if isinstance(event, SequenceFailed)]
        assert isinstance(failure.error, EngineFault)
        assert "lost its group" in failure.error.message
        others[1].join(LIMIT_S)
        assert others[1].exitcode == 1
        thread.stop(LIMIT_S)
        assert thread.fault is not None


def test_a_follower_that_dies_while_nothing_is_computed_is_noticed(
    folder: ModelFolder, tmp_path: Path
) -> None:
    with leading(folder, RankLayout(2), tmp_path) as (leader, others):
        thread, _ = start_engine(leader)
        others[0].kill()
        thread._thread.join(LIMIT_S)
        assert thread.fault is not None
        assert "lost its group" in thread.fault.message
