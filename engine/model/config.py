"""What a model is made of, read from a Hugging Face config.json of any vintage.

Transformers 5 writes `rope_parameters`; older versions wrote `rope_theta` and `rope_scaling`. Both are
understood. What this engine cannot compute exactly is a `StartupError`, never an approximation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.model.experts import ExpertsConfig, read_experts
from engine.model.hf_json import Json, convert, get, need
from protocol.errors import StartupError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions are encoded; the fields below `factor` belong to single types."""

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int = 0
    """yarn, llama3, dynamic: the context length of the pre-training."""
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True, slots=True)
class _Family:
    """What sets one architecture apart, and the defaults that its config class fills in."""

    qkv_bias: bool | None = None
    """None: as `attention_bias` says."""
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    head_dim: int | None = None
    max_positions: int = 32768
    sliding_window: int | None = None
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    bos_token_id: int | None = None
    eos_token_id: int | None = None


FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(max_positions=2048, bos_token_id=1, eos_token_id=2),
    "MistralForCausalLM": _Family(
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        max_positions=131072,
        sliding_window=4096,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, output_bias=False, mlp_bias=False, sliding_window=4096),
    "Qwen3ForCausalLM": _Family(mlp_bias=False, qk_norm=True, head_dim=128, sliding_window=4096),
    "MixtralForCausalLM": _Family(
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        max_positions=131072,
        rope_theta=1000000.0,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "Qwen3MoeForCausalLM": _Family(mlp_bias=False, qk_norm=True, sliding_window=4096),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only model with RMS norms, rotary positions, grouped queries and gated SiLU MLPs."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    """Per layer: how many positions a token sees, its own included; None: all."""
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    experts: tuple[ExpertsConfig | None, ...]
    """Per layer: what takes the place of its MLP; None: nothing does."""
    has_embedding: bool = True
    """False in a part of a model whose first layer is not the model's."""
    has_head: bool = True
    """False in a part of a model whose last layer is not the model's; it has no last norm either."""

    @property
    def max_model_len(self) -> int:
        """The longest sequence that the position encoding was made for."""
        match self.rope.rope_type:
            case "linear" | "dynamic":
                return int(self.max_position_embeddings * self.rope.factor)
            case "yarn":
                stretched = int(self.rope.original_max_positions * self.rope.factor)
                return max(self.max_position_embeddings, stretched)
            case _:
                return self.max_position_embeddings

    @staticmethod
    def from_hf(config: Json) -> ModelConfig:
        """Read a config.json. Raises `StartupError` when the model is none that the engine can run."""
        architecture = _architecture(config)
        family = FAMILIES[architecture]
        _refuse_unsupported(config)
        hidden_size = need(config, "hidden_size", int)
        num_heads = need(config, "num_attention_heads", int)
        num_layers = need(config, "num_hidden_layers", int)
        num_kv_heads = get(config, "num_key_value_heads", int, num_heads)
        if num_heads % num_kv_heads:
            raise StartupError(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads")
        max_positions = get(config, "max_position_embeddings", int, family.max_positions)
        bias = get(config, "attention_bias", bool, False)
        return ModelConfig(
            architecture=architecture,
            vocab_size=need(config, "vocab_size", int),
            hidden_size=hidden_size,
            intermediate_size=need(config, "intermediate_size", int),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=get(config, "head_dim", int, family.head_dim or hidden_size // num_heads),
            rms_norm_eps=get(config, "rms_norm_eps", float, family.rms_norm_eps),
            rope=_read_rope(config, max_positions, family.rope_theta),
            windows=_windows(config, architecture, num_layers),
            max_position_embeddings=max_positions,
            tie_word_embeddings=get(config, "tie_word_embeddings", bool, False),
            qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=bias if family.output_bias is None else family.output_bias,
            mlp_bias=get(config, "mlp_bias", bool, False) if family.mlp_bias is None else family.mlp_bias,
            qk_norm=family.qk_norm,
            bos_token_id=_first(_token_ids(config, "bos_token_id", family.bos_token_id)),
            eos_token_ids=_token_ids(config, "eos_token_id", family.eos_token_id),
            experts=read_experts(config, architecture, num_layers),
        )


def _architecture(config: Json) -> str:
    named = config.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list | tuple) else []
    for name in names:
        if name in FAMILIES:
            return name
    raise StartupError(
        f"the model's architecture {', '.join(names) or '(none named)'} is not supported; "
        f"supported are {', '.join(FAMILIES)}"
    )


def _refuse_unsupported(config: Json) -> None:
    activation = get(config, "hidden_act", str, "silu")
    if activation != "silu":
        raise StartupError(f"the activation {activation!r} is not supported; only 'silu' is")
    if config.get("quantization_config"):
        raise StartupError(
            "quantised checkpoints are not supported; use the unquantised one or a GGUF file"
        )


def _windows(config: Json, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Qwen2 and 3 slide where `layer_types` or `max_window_layers` says; others in all layers or none."""
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    # An explicit null switches the window off, and is not the same as an absent key.
    window = config.get("sliding_window", FAMILIES[architecture].sliding_window)
    size = None if window is None else convert("sliding_window", window, int)
    if architecture in {"MistralForCausalLM", "MixtralForCausalLM"}:
        return (size,) * num_layers
    layer_types = config.get("layer_types")
    if not get(config, "use_sliding_window", bool, False) or size is None:
        return (None,) * num_layers
    if architecture == "Qwen3MoeForCausalLM":
        return (size,) * num_layers
    if isinstance(layer_types, list | tuple):
        return tuple(size if kind == "sliding_attention" else None for kind in layer_types)
    first = get(config, "max_window_layers", int, 28)
    return tuple(size if layer >= first else None for layer in range(num_layers))


def _read_rope(config: Json, max_positions: int, default_theta: float) -> RopeConfig:
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise StartupError(f"the model's rope parameters must be an object, not {found!r}")
    rope_type = str(found.get("rope_type", found.get("type", "default")))
    if rope_type not in ROPE_TYPES:
        raise StartupError(
            f"rope type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
        )
    if get(found, "partial_rotary_factor", float, get(config, "partial_rotary_factor", float, 1.0)) != 1.0:
        raise StartupError("models that rotate a part of each head only are not supported")
    original = get(
        config,
        "original_max_position_embeddings",
        int,
        get(found, "original_max_position_embeddings", int, max_positions),
    )
    return RopeConfig(
        rope_type=rope_type,
        theta=get(found, "rope_theta", float, get(config, "rope_theta", float, default_theta)),
        factor=get(found, "factor", float, max_positions / original if rope_type == "yarn" else 1.0),
        # HF's dynamic scaling starts from max_position_embeddings, whatever else is written down.
        original_max_positions=max_positions if rope_type == "dynamic" else original,
        attention_factor=get(found, "attention_factor", float, None),
        beta_fast=get(found, "beta_fast", float, 32.0) or 32.0,
        beta_slow=get(found, "beta_slow", float, 1.0) or 1.0,
        mscale=get(found, "mscale", float, 0.0),
        mscale_all_dim=get(found, "mscale_all_dim", float, 0.0),
        truncate=get(found, "truncate", bool, True),
        low_freq_factor=get(found, "low_freq_factor", float, 1.0),
        high_freq_factor=get(found, "high_freq_factor", float, 4.0),
    )


def _token_ids(config: Json, key: str, default: int | None) -> tuple[int, ...]:
    value = config.get(key, default)
    if value is None:
        return ()
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(convert(key, item, int) for item in values)


def _first(token_ids: tuple[int, ...]) -> int | None:
    return token_ids[0] if token_ids else None
