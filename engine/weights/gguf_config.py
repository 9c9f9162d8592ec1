"""A GGUF file's metadata as Hugging Face's config.json and generation_config.json."""

from __future__ import annotations

import math
import struct
from typing import Any

from engine.weights.gguf_file import GgufFile
from protocol.errors import StartupError

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Mistral files call themselves llama; the mathematics is the same."""
_CLASSES_WITH_EXPERTS = {"llama": "MixtralForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM"}
SUPPORTED_ARCHITECTURES = tuple(sorted({**_CLASSES, **_CLASSES_WITH_EXPERTS}))
_BEYOND = {
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),
    "leading_dense_block_count": (0,),
}
"""What changes what experts give, and the values at which it does not; gating 1 is softmax."""
ROPE_FACTORS_TENSOR = "rope_freqs.weight"
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
"""The same in all published models with this scaling; only the factor differs."""


def hf_config(gguf: GgufFile) -> dict[str, Any]:
    """The content of config.json. Raises `StartupError` for what cannot be served."""
    _refuse_unsupported(gguf)
    num_heads = gguf.count("attention.head_count")
    hidden_size = gguf.count("embedding_length")
    if num_heads < 1:
        raise StartupError(f"{gguf.path} says that the model has {num_heads} heads: download it again")
    config = {
        "architectures": [_classes(gguf)[gguf.architecture]],
        "model_type": gguf.architecture,
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": gguf.count("feed_forward_length"),
        "num_hidden_layers": gguf.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": gguf.count("attention.head_count_kv", num_heads),
        "head_dim": _head_dim(gguf, hidden_size // num_heads),
        "rms_norm_eps": _shortest(gguf.number("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": gguf.count("context_length"),
        "rope_parameters": _rope_parameters(gguf),
        "vocab_size": _vocab_size(gguf),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **_token_ids(gguf),
        **_experts(gguf),
    }
    if gguf.architecture != "qwen2":  # its biases are part of the architecture
        config["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
    if gguf.architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in gguf.tensors
    return config


def generation_config(gguf: GgufFile) -> dict[str, Any]:
    """The content of generation_config.json: which tokens begin and end an answer."""
    return _token_ids(gguf)


def end_token_ids(gguf: GgufFile) -> list[int]:
    """All tokens that the file says end an answer, the main one first."""
    found = [gguf.metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    return list(dict.fromkeys(int(token_id) for token_id in found if token_id is not None))


def _token_ids(gguf: GgufFile) -> dict[str, Any]:
    ends = end_token_ids(gguf)
    return {
        "bos_token_id": gguf.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": gguf.metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _refuse_unsupported(gguf: GgufFile) -> None:
    if gguf.architecture not in SUPPORTED_ARCHITECTURES:
        raise StartupError(
            f"{gguf.path} holds a model of architecture {gguf.architecture!r}; "
            f"supported in GGUF files: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if gguf.architecture not in _classes(gguf):
        kind = "with" if has_experts(gguf) else "without"
        raise StartupError(
            f"{gguf.path} holds a model of architecture {gguf.architecture!r} {kind} experts, "
            "which is not supported: get another file"
        )
    for key, harmless in _BEYOND.items() if has_experts(gguf) else ():
        value = gguf.of_architecture(key, harmless[0])
        if value not in harmless:
            raise StartupError(
                f"{gguf.path} holds a mixture of experts with {key} {value!r}, which is not supported: "
                "get a model with experts as those of Mixtral or Qwen3-MoE"
            )
    if gguf.of_architecture("attention.sliding_window"):
        raise StartupError(
            f"{gguf.path} holds a model with sliding-window attention, which is not supported"
        )


def _classes(gguf: GgufFile) -> dict[str, str]:
    return _CLASSES_WITH_EXPERTS if has_experts(gguf) else _CLASSES


def has_experts(gguf: GgufFile) -> bool:
    return gguf.count("expert_count", 0) > 0


def _experts(gguf: GgufFile) -> dict[str, Any]:
    """llama.cpp makes the weights of a token's experts add up to 1 in both kinds of model."""
    if not has_experts(gguf):
        return {}
    return {
        "num_local_experts": gguf.count("expert_count"),
        "num_experts_per_tok": gguf.count("expert_used_count"),
        "moe_intermediate_size": gguf.count(
            "expert_feed_forward_length", gguf.count("feed_forward_length")
        ),
        "norm_topk_prob": bool(gguf.of_architecture("expert_weights_norm", True)),
    }


def _head_dim(gguf: GgufFile, default: int) -> int:
    head_dim = gguf.count("attention.key_length", gguf.count("rope.dimension_count", default))
    rotary = gguf.count("rope.dimension_count", head_dim)
    value_dim = gguf.count("attention.value_length", head_dim)
    if not head_dim == value_dim == rotary:
        raise StartupError(
            f"{gguf.path}: key size {head_dim}, value size {value_dim} and rotary size {rotary} of a head "
            "must be equal"
        )
    return head_dim


def _vocab_size(gguf: GgufFile) -> int:
    """Rows of the embedding: some files pad it, or state another number."""
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise StartupError(f"{gguf.path} lacks the tensor 'token_embd.weight': download it again")
    return embedding.num_rows


def _rope_parameters(gguf: GgufFile) -> dict[str, Any]:
    theta = {"rope_theta": _shortest(gguf.number("rope.freq_base", 10000.0))}
    kind = gguf.of_architecture("rope.scaling.type", "none")
    if ROPE_FACTORS_TENSOR in gguf.tensors:
        return theta | _llama3_scaling(gguf)
    if kind == "none":
        linear = _shortest(gguf.number("rope.scale_linear", 1.0))
        return theta | ({"rope_type": "default"} if linear == 1.0 else _linear_scaling(linear))
    if kind == "linear":
        return theta | _linear_scaling(_shortest(gguf.number("rope.scaling.factor")))
    if kind == "yarn":
        return theta | _yarn_scaling(gguf)
    raise StartupError(
        f"{gguf.path} scales its rotary embedding by {kind!r}; supported: none, linear, yarn, llama3"
    )


def _linear_scaling(factor: float) -> dict[str, Any]:
    return {"rope_type": "linear", "factor": factor}


def _yarn_scaling(gguf: GgufFile) -> dict[str, Any]:
    if gguf.of_architecture("rope.scaling.yarn_log_multiplier"):
        raise StartupError(f"{gguf.path} uses a variant of YaRN (log multiplier) that is not supported")
    factor = _shortest(gguf.number("rope.scaling.factor"))
    original = gguf.count("rope.scaling.original_context_length", gguf.count("context_length"))
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": _shortest(gguf.number("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": _shortest(gguf.number("rope.scaling.yarn_beta_slow", 1.0)),
    }
    attention = _shortest(gguf.number("rope.scaling.attn_factor", 1.0))
    if attention != 1.0:  # the file's multiplies what the paper's formula gives, ours replaces it
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return scaling


def _llama3_scaling(gguf: GgufFile) -> dict[str, Any]:
    """Find the one number behind the per-frequency factors that such files store instead of it."""
    tensor = gguf.tensors[ROPE_FACTORS_TENSOR]
    if tensor.kind != 0:
        raise StartupError(f"{gguf.path}: {ROPE_FACTORS_TENSOR} is not stored as F32")
    stored = struct.unpack_from(f"<{tensor.num_rows}f", gguf.data, tensor.offset)
    factor = _shortest(max(stored))
    if factor == 1.0:
        return {"rope_type": "default"}
    theta = gguf.number("rope.freq_base", 10000.0)
    if not all(map(_close, stored, _llama3_factors(theta, len(stored), factor))):
        raise StartupError(
            f"{gguf.path} scales its rotary embedding in a way that is not supported "
            f"({ROPE_FACTORS_TENSOR} is not Llama 3's)"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _llama3_factors(theta: float, num_frequencies: int, factor: float) -> list[float]:
    """By what Llama 3.1 divides each frequency, from the fastest to the slowest."""
    factors = []
    for index in range(num_frequencies):
        wavelength = 2 * math.pi * theta ** (index / num_frequencies)
        smooth = (_LLAMA3_CONTEXT / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
        smooth = min(1.0, max(0.0, smooth))
        factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return factors


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-3)


def _shortest(value: float) -> float:
    """The shortest decimal that a float32 of the file stands for: 1e-05, not 9.99999974e-06."""
    (single,) = struct.unpack("<f", struct.pack("<f", value))
    for digits in range(1, 10):
        candidate = float(f"{single:.{digits}g}")
        if struct.pack("<f", candidate) == struct.pack("<f", single):
            return candidate
    return float(single)
