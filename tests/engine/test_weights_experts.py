"""Checkpoints of experts in every layout that is in use give the same weights, whole and in parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import CPU, checkpoint_of, make_reference

from engine.model import ModelConfig
from engine.model.weights import pack_weights
from engine.ops import LinearStack, TorchOps
from engine.parallel import shard_of
from engine.weights import ModelFolder, load_weights
from engine.weights.checkpoint import read_checkpoint
from engine.weights.experts import one_by_one
from engine.weights.folder import open_folder
from engine.weights.packed_file import map_parts, write_parts
from engine.weights.part import byte_range
from protocol.errors import StartupError
from protocol.rank_layout import RankLayout

KINDS = ["mixtral", "qwen3_moe_mixed"]


def save_stacked(kind: str, path: Path) -> ModelFolder:
    """As transformers 5 has experts in memory, and saves them when it is told not to take them apart."""
    reference = make_reference(kind)
    reference.save_pretrained(path, save_original_format=False)
    return open_folder(path, name=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_both_layouts_of_transformers_are_read_alike(kind: str, tmp_path: Path) -> None:
    reference = make_reference(kind)
    expected = checkpoint_of(reference)
    reference.save_pretrained(tmp_path / "apart")
    stacked = save_stacked(kind, tmp_path / "stacked")
    assert any(tensor.name.endswith("experts.gate_up_proj") for tensor in read_checkpoint(stacked.path))
    for folder in (open_folder(tmp_path / "apart", name=kind), stacked):
        found = load_weights(folder, torch.float32)
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_a_rank_reads_its_part_of_stacked_experts(kind: str, expert_parallel: bool, tmp_path: Path) -> None:
    make_reference(kind).save_pretrained(tmp_path / "apart")
    apart, stacked = open_folder(tmp_path / "apart", name=kind), save_stacked(kind, tmp_path / "stacked")
    for rank in range(2):
        shard = shard_of(
            ModelConfig.from_hf(apart.config), rank, RankLayout(2), expert_parallel=expert_parallel
        )
        expected, found = (load_weights(folder, torch.float32, shard=shard) for folder in (apart, stacked))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_the_places_of_stacked_experts_are_where_their_bytes_lie(tmp_path: Path) -> None:
    folder = save_stacked("mixtral", tmp_path)
    weights = load_weights(folder, torch.float32)
    matrices = [tensor for tensor in one_by_one(read_checkpoint(folder.path)) if tensor.matrix]
    assert len(matrices) == 3 * 4 * 3  # layers, experts, matrices of each
    for matrix in matrices:
        offset, length = byte_range(matrix, None)
        content = matrix.file.read_bytes()[offset : offset + length]
        assert content == weights[matrix.name].contiguous().numpy().tobytes()


def test_a_stack_of_another_shape_is_refused(tmp_path: Path) -> None:
    save_file(
        {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 7, 8)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(StartupError, match="no matrices of experts: download it again"):
        list(one_by_one(read_checkpoint(tmp_path)))


def test_a_missing_expert_is_named() -> None:
    reference = make_reference("mixtral")
    weights = checkpoint_of(reference)
    del weights["model.layers.1.mlp.experts.2.up_proj.weight"]
    config = ModelConfig.from_hf(
        {**reference.config.to_dict(), "architectures": ["MixtralForCausalLM"], "dtype": None}
    )
    with pytest.raises(
        StartupError, match=r"lacks the weight 'model.layers.1.mlp.experts.2.up_proj.weight'"
    ):
        pack_weights(config, weights, TorchOps(CPU, torch.float32), CPU, torch.float32)


def test_a_stack_of_packed_matrices_comes_back_from_its_file(tmp_path: Path) -> None:
    stack, key = LinearStack(torch.randn(2, 3, 4), 3), {"revision": "r"}
    write_parts(tmp_path / "file", key, [("stack", stack)])
    found = map_parts(tmp_path / "file", key)["stack"]
    assert isinstance(found, LinearStack)
    assert found.out_features == 3
    assert len(found) == 2
    for index in range(2):
        assert torch.equal(found[index].weight, stack[index].weight)
