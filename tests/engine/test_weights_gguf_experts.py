"""GGUF files of mixtures of experts: the weights exactly, the config, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from weights_samples import FFN, stacked_experts, tensors_of, write_gguf

from engine.model import ModelConfig
from engine.weights import load_weights, resolve_model
from protocol.errors import StartupError

NUM_EXPERTS = 3
K = GGMLQuantizationType


def describe(writer: GGUFWriter) -> None:
    writer.add_expert_count(NUM_EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(FFN)


def write(
    path: Path,
    arch: str,
    tensors: dict[str, torch.Tensor],
    *,
    kind: GGMLQuantizationType = K.F32,
    more: Callable[[GGUFWriter], None] = describe,
    joined: bool = False,
) -> Path:
    apart = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    stacks = stacked_experts({name: tensor for name, tensor in tensors.items() if ".experts." in name})
    if joined:
        gate, up = (stacks.pop(f"blk.0.ffn_{name}_exps.weight") for name in ("gate", "up"))
        stacks["blk.0.ffn_gate_up_exps.weight"] = np.concatenate([gate, up], axis=1)
    raw = {name: (quantize(stack, kind), kind) for name, stack in stacks.items()}
    return write_gguf(path / "m.gguf", arch, apart, more=more, raw=raw)


def load(gguf: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    folder = resolve_model(str(gguf), cache_dir=gguf.parent / "cache")
    return load_weights(folder, torch.float32), folder.config


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_experts_come_out_as_they_went_in(arch: str, joined: bool, tmp_path: Path) -> None:
    tensors = tensors_of(arch, num_experts=NUM_EXPERTS)
    found, config = load(write(tmp_path, arch, tensors, joined=joined))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    (experts,) = ModelConfig.from_hf(config).experts
    assert experts is not None
    assert (experts.num_experts, experts.num_per_token, experts.intermediate_size) == (3, 2, FFN)
    assert experts.normalizes
    assert config["architectures"] == ["MixtralForCausalLM" if arch == "llama" else "Qwen3MoeForCausalLM"]


def test_quantised_experts_are_the_values_of_their_blocks(tmp_path: Path) -> None:
    tensors = tensors_of("qwen3moe", num_experts=NUM_EXPERTS)
    found, _ = load(write(tmp_path, "qwen3moe", tensors, kind=K.Q8_0))
    for name, tensor in tensors.items():
        wanted = tensor
        if ".experts." in name:
            wanted = torch.from_numpy(dequantize(quantize(tensor.numpy(), K.Q8_0), K.Q8_0))
        assert torch.equal(found[name], wanted), name


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda w: w.add_expert_shared_count(1), "expert_shared_count 1"),
        (lambda w: w.add_expert_weights_scale(2.5), r"expert_weights_scale 2\.5"),
    ],
)
def test_experts_of_other_kinds_are_refused(
    change: Callable[[GGUFWriter], None], why: str, tmp_path: Path
) -> None:
    def more(writer: GGUFWriter) -> None:
        describe(writer)
        change(writer)

    gguf = write(tmp_path, "qwen3moe", tensors_of("qwen3moe", num_experts=NUM_EXPERTS), more=more)
    with pytest.raises(StartupError, match=why + ".*as those of Mixtral or Qwen3-MoE"):
        load(gguf)


def test_a_file_without_an_expert_stack_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of("llama", num_experts=NUM_EXPERTS)
    without = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    gguf = write_gguf(tmp_path / "m.gguf", "llama", without, more=describe)
    with pytest.raises(StartupError, match=r"lacks 3 tensors \('blk.0.ffn_gate_exps.weight'"):
        load(gguf)


def test_experts_in_an_architecture_that_has_none_are_refused(tmp_path: Path) -> None:
    gguf = write(tmp_path, "qwen3", tensors_of("qwen3", num_experts=NUM_EXPERTS))
    with pytest.raises(StartupError, match="'qwen3' with experts"):
        load(gguf)
