"""Which layers of a model have experts, and how do tokens choose among them? Read from config.json."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.model.hf_json import Json, convert, get, need
from protocol.errors import StartupError

_BEYOND = {
    "shared_expert_intermediate_size": 0,
    "n_shared_experts": 0,
    "num_shared_experts": 0,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
}
"""What changes the result, and the values at which it does not."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The gated SiLU MLPs of one layer, a few of which each token passes."""

    num_experts: int
    num_per_token: int
    intermediate_size: int
    """Of each."""
    normalizes: bool
    """The weights of a token's experts are made to add up to 1."""
    held: range
    """The experts whose weights are here; the others are other ranks'."""


def read_experts(config: Json, architecture: str, num_layers: int) -> tuple[ExpertsConfig | None, ...]:
    """Per layer; None where it has an ordinary MLP. Raises `StartupError` for what is not supported."""
    match architecture:
        case "MixtralForCausalLM":
            experts = _read(config, need(config, "intermediate_size", int), 2, normalizes=True)
            return (experts,) * num_layers
        case "Qwen3MoeForCausalLM":
            if get(config, "num_experts", int, get(config, "num_local_experts", int, 128)) == 0:
                return (None,) * num_layers
            size = need(config, "moe_intermediate_size", int)
            experts = _read(config, size, 8, normalizes=get(config, "norm_topk_prob", bool, False))
            return tuple(experts if has else None for has in _qwen3_layers(config, num_layers))
        case _:
            return (None,) * num_layers


def experts_of(layers: Iterable[ExpertsConfig | None]) -> ExpertsConfig | None:
    """Those of the layers that have any: they are alike."""
    return next((experts for experts in layers if experts is not None), None)


def _read(config: Json, intermediate_size: int, num_per_token: int, *, normalizes: bool) -> ExpertsConfig:
    _refuse_unsupported(config)
    # Transformers 5 writes num_local_experts for every family.
    num_experts = get(config, "num_experts", int, None) or need(config, "num_local_experts", int)
    chosen = get(config, "num_experts_per_tok", int, num_per_token)
    if not 1 <= chosen <= num_experts:
        raise StartupError(f"a token cannot choose {chosen} of the model's {num_experts} experts")
    return ExpertsConfig(num_experts, chosen, intermediate_size, normalizes, range(num_experts))


def _refuse_unsupported(config: Json) -> None:
    for key, harmless in _BEYOND.items():
        value = config.get(key)
        if value is not None and value != harmless:
            raise StartupError(
                f"experts with {key!r}: {value!r} are not supported; take a model with experts as those "
                "of Mixtral or Qwen3-MoE: chosen by a softmax over all, and none that are shared"
            )


def _qwen3_layers(config: Json, num_layers: int) -> list[bool]:
    step = get(config, "decoder_sparse_step", int, 1)
    listed = config.get("mlp_only_layers") or []
    if step < 1 or not isinstance(listed, list | tuple):
        raise StartupError(
            f"config.json has 'decoder_sparse_step': {step!r} and 'mlp_only_layers': {listed!r}; "
            "these must be a number from 1 on and a list of layers: download it again"
        )
    dense = {convert("mlp_only_layers", layer, int) for layer in listed}
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]
