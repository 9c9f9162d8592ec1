"""Weights of a rank: its own rows and columns, read from the file; together they are the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_shards import write_model

from engine.model import ModelConfig
from engine.parallel import Shard, shard_of
from engine.weights import ModelFolder, load_weights
from engine.weights.checkpoint import read_checkpoint
from engine.weights.part import byte_range, part_bytes
from protocol.errors import StartupError
from protocol.rank_layout import RankLayout

KINDS = ["llama_biased", "qwen2", "qwen3", "multi_head", "one_kv_head"]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return write_model(request.param, tmp_path_factory.mktemp("model"))


def shards_of(folder: ModelFolder, num_ranks: int) -> list[Shard]:
    config = ModelConfig.from_hf(folder.config)
    return [shard_of(config, rank, RankLayout(num_ranks)) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_ranks_parts_are_the_whole_model(folder: ModelFolder, num_ranks: int) -> None:
    whole = load_weights(folder, torch.float32)
    shards = shards_of(folder, num_ranks)
    parts = [load_weights(folder, torch.float32, shard=shard) for shard in shards]
    for name, weight in whole.items():
        cut = shards[0].cut(name)
        if cut is None and shards[1].is_added_elsewhere(name):
            assert torch.equal(sum(part[name] for part in parts), weight)
        elif cut is None:
            assert all(torch.equal(part[name], weight) for part in parts)
        else:
            found = torch.full_like(weight, float("nan"))
            for shard, part in zip(shards, parts, strict=True):
                span = shard.cut(name).span  # type: ignore[union-attr]
                assert part[name].shape[cut.axis] == len(span)
                found.narrow(cut.axis, span.start, len(span)).copy_(part[name])
            assert torch.equal(found, weight), name


def test_the_rows_of_a_rank_are_read_ahead_and_no_others(folder: ModelFolder) -> None:
    shard = shards_of(folder, 3)[1]
    weights = load_weights(folder, torch.float32, shard=shard)
    num_bytes = 0
    for stored in read_checkpoint(folder.path):
        cut = shard.cut(stored.name)
        num_bytes += part_bytes(stored, shard)
        if cut is not None and cut.axis == 0:
            offset, length = byte_range(stored, shard)
            found = stored.file.read_bytes()[offset : offset + length]
            assert found == weights[stored.name].numpy().tobytes()
    assert num_bytes == sum(weight.nbytes for weight in weights.values())


def test_a_weight_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path)
    folder.config["intermediate_size"] = 90  # of 96: the ranks' ranges would be there
    with pytest.raises(
        StartupError, match=r"gate_proj.*config.json implies 90 along dimension 0|down_proj"
    ):
        load_weights(folder, torch.float32, shard=shards_of(folder, 2)[0])
