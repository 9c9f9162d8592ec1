"""Weights of a rank: its own rows and columns, read from the file; together they are the model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny_models import CPU
from tiny_shards import write_model

from engine.model import ModelConfig
from engine.model.weights import packed_parts
from engine.ops import TorchOps
from engine.parallel import Shard, shard_of
from engine.weights import ModelFolder, SilentProgress, load_weights
from engine.weights.checkpoint import read_checkpoint
from engine.weights.part import byte_range, part_bytes
from protocol.errors import StartupError
from protocol.rank_layout import RankLayout

KINDS = ["llama_biased", "qwen2", "qwen3", "multi_head", "one_kv_head"]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return write_model(request.param, tmp_path_factory.mktemp("model"))


class CountingProgress(SilentProgress):
    """How many bytes a load says that it read."""

    num_bytes = 0

    def advance(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes


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


@pytest.mark.parametrize("layout", [RankLayout(1, 3), RankLayout(2, 2)], ids=["stages", "both"])
def test_weights_of_other_stages_are_neither_read_nor_held(folder: ModelFolder, layout: RankLayout) -> None:
    config = ModelConfig.from_hf(folder.config)
    whole = load_weights(folder, torch.float32)
    shards = [shard_of(config, rank, layout) for rank in range(layout.num_ranks)]
    found: Counter[str] = Counter()
    for shard in shards:
        reported = CountingProgress()
        part = load_weights(folder, torch.float32, shard=shard, progress=reported)
        held = {name: shard.local_name(name) for name in whole if shard.local_name(name)}
        assert set(part) == set(held.values())
        assert reported.num_bytes == sum(weight.nbytes for weight in part.values())
        for name, local_name in held.items():
            cut, expected = shard.cut(name), whole[name]
            if cut is not None:
                expected = expected.narrow(cut.axis, cut.span.start, len(cut.span))
            elif shard.is_added_elsewhere(name):
                expected = torch.zeros_like(expected)
            assert torch.equal(part[local_name or ""], expected), name
        found.update(held.keys())
    expected_counts = Counter(dict.fromkeys(whole, layout.tensor_parallel_size))
    if config.tie_word_embeddings:
        expected_counts["model.embed_tokens.weight"] *= 2
    assert found == expected_counts


def test_only_the_ends_of_a_pipeline_pack_an_embedding_and_a_head(folder: ModelFolder) -> None:
    config, layout = ModelConfig.from_hf(folder.config), RankLayout(1, 3)
    ends = []
    for rank in range(3):
        shard = shard_of(config, rank, layout)
        weights = load_weights(folder, torch.float32, shard=shard)
        parts = dict(packed_parts(shard.local, weights, TorchOps(CPU, torch.float32), CPU, torch.float32))
        ends.append({name for name in parts if not name.startswith("layers.")})
        assert {name.split(".")[1] for name in parts if name.startswith("layers.")} == {"0"}
    assert ends == [{"embedding"}, set(), {"norm", "head"}]


def test_a_weight_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path)
    folder.config["intermediate_size"] = 90  # of 96: the ranks' ranges would be there
    with pytest.raises(
        StartupError, match=r"gate_proj.*config.json implies 90 along dimension 0|down_proj"
    ):
        load_weights(folder, torch.float32, shard=shards_of(folder, 2)[0])
