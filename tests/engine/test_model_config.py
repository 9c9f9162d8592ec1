"""Reading config.json of every supported family, old and new spelling, and refusing the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tiny_models import KINDS, SMALL, make_reference

from engine.model import ModelConfig, RopeConfig
from engine.model.experts import ExpertsConfig
from engine.model.rope import rope_tables
from protocol.errors import StartupError

OLD_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**OLD_LLAMA, **changes})


def test_an_old_config_gets_the_defaults_of_its_family() -> None:
    config = read()
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert config.rope == RopeConfig(original_max_positions=2048)
    assert (config.max_position_embeddings, config.max_model_len) == (2048, 2048)
    assert config.windows == (None,) * 4
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert not config.tie_word_embeddings
    assert not any((config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm))


def test_both_spellings_of_rope_mean_the_same() -> None:
    scaling = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    original = {"original_max_position_embeddings": 8192}
    old = read(
        rope_theta=500000,
        rope_scaling={"rope_type": "llama3", **scaling, **original},
        max_position_embeddings=131072,
    )
    new = read(
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **scaling, **original},
        max_position_embeddings=131072,
    )
    assert old == new
    assert old.rope.theta == 500000.0
    assert old.max_model_len == 131072


@pytest.mark.parametrize(
    ("scaling", "max_model_len"),
    [
        ({"type": "linear", "factor": 4.0}, 8192),
        ({"type": "dynamic", "factor": 2.0}, 4096),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"type": "yarn", "factor": 4.0}, 8192),
    ],
)
def test_scaled_rope_stretches_the_longest_sequence(scaling: dict[str, Any], max_model_len: int) -> None:
    assert read(rope_scaling=scaling).max_model_len == max_model_len


def test_several_end_tokens_are_kept_in_order() -> None:
    assert read(eos_token_id=[128001, 128009]).eos_token_ids == (128001, 128009)
    assert read(architectures=["Qwen2ForCausalLM"], eos_token_id=None).eos_token_ids == ()


def test_qwen2_slides_only_where_told() -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 50, "max_window_layers": 3}
    assert read(**qwen).windows == (None,) * 4
    assert read(**qwen, use_sliding_window=True).windows == (None, None, None, 50)
    layer_types = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    assert read(**qwen, use_sliding_window=True, layer_types=layer_types).windows == (None, 50, None, None)


def test_mistral_slides_in_all_layers_unless_null() -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert read(**mistral).windows == (4096,) * 4
    assert read(**mistral, sliding_window=None).windows == (None,) * 4


def test_qwen3_heads_are_not_a_share_of_the_hidden_size() -> None:
    config = read(architectures=["Qwen3ForCausalLM"])
    assert config.head_dim == 128
    assert config.qk_norm


MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
}


def test_mixtral_has_experts_of_the_size_of_its_mlp_in_all_layers() -> None:
    config = read(**MIXTRAL)
    assert config.experts == (ExpertsConfig(8, 2, 96, normalizes=True, held=range(8)),) * 4
    assert (config.rope.theta, config.rms_norm_eps, config.windows) == (1000000.0, 1e-5, (None,) * 4)
    assert read().experts == (None,) * 4


def test_qwen3_moe_has_experts_where_it_is_told() -> None:
    experts = ExpertsConfig(16, 4, 24, normalizes=False, held=range(16))
    assert read(**QWEN3_MOE).experts == (experts,) * 4
    assert read(**QWEN3_MOE, decoder_sparse_step=2).experts == (None, experts, None, experts)
    assert read(**QWEN3_MOE, mlp_only_layers=[0, 3]).experts == (None, experts, experts, None)
    assert read(**{**QWEN3_MOE, "num_experts": 0}).experts == (None,) * 4
    normalising = read(**QWEN3_MOE, norm_topk_prob=True).experts[0]
    assert normalising is not None
    assert normalising.normalizes


def test_both_names_of_the_number_of_experts_are_read() -> None:
    old = read(**QWEN3_MOE)
    new = {**QWEN3_MOE, "num_local_experts": 16}
    del new["num_experts"]
    assert read(**new) == old


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**MIXTRAL, "num_experts_per_tok": 9}, "cannot choose 9 of the model's 8 experts"),
        ({**MIXTRAL, "num_local_experts": None}, "lacks 'num_local_experts'"),
        ({**QWEN3_MOE, "moe_intermediate_size": None}, "lacks 'moe_intermediate_size'"),
        ({**QWEN3_MOE, "scoring_func": "sigmoid"}, "'scoring_func': 'sigmoid'.*of Mixtral or Qwen3-MoE"),
        ({**QWEN3_MOE, "shared_expert_intermediate_size": 64}, "none that are shared"),
        ({**QWEN3_MOE, "decoder_sparse_step": 0}, "a number from 1 on"),
        ({**QWEN3_MOE, "mlp_only_layers": 3}, "a list of layers"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM.*Qwen3MoeForCausalLM"),
    ],
)
def test_experts_that_cannot_be_run_are_refused_with_a_reason(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported are LlamaForCausalLM"),
        ({"architectures": None}, "none named"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope.*llama3"),
        ({"partial_rotary_factor": 0.5}, "a part of each head"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"vocab_size": "many"}, "no int"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"rope_scaling": "linear"}, "must be an object"),
    ],
)
def test_what_cannot_be_run_is_refused_with_a_reason(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        read(**changes)


@pytest.mark.parametrize("kind", KINDS)
def test_rope_tables_equal_those_of_transformers(kind: str) -> None:
    """For dynamic rope within the pre-trained length only; what lies beyond has its own test."""
    reference = make_reference(kind)
    config = ModelConfig.from_hf(
        {**json.loads(reference.config.to_json_string()), "architectures": [type(reference).__name__]}
    )
    positions = torch.arange(SMALL["max_position_embeddings"])
    cos, sin = reference.model.rotary_emb(torch.empty(0), positions[None])
    own_cos, own_sin = rope_tables(config.rope, config.head_dim, len(positions), torch.float32)
    half = config.head_dim // 2
    torch.testing.assert_close(own_cos, cos[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(own_sin[:, half:], sin[0, :, half:], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(own_sin[:, :half], -sin[0, :, :half], rtol=1e-6, atol=1e-6)
