"""What a model computes with: its weights fused and packed, each part known by a name.

    Hugging Face's tensors --packed_parts--> (name, part), one at a time --assemble--> ModelWeights

Parts come one at a time so that they can be put away before the next one is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from engine.model.config import ModelConfig
from engine.model.experts import ExpertsConfig
from engine.ops import Linear, LinearStack, Ops
from protocol.errors import StartupError

Part = torch.Tensor | Linear | LinearStack


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """The MLP that all tokens pass."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The MLPs that a few tokens pass each; those of the experts that are held here."""

    config: ExpertsConfig
    router: Linear
    gate_ups: LinearStack
    downs: LinearStack


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; what is multiplied by the same input is fused."""

    input_norm: torch.Tensor
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor
    mlp: MlpWeights | ExpertWeights
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All of them. A part of a model may lack its ends: see `ModelConfig.has_embedding` and `has_head`."""

    embedding: torch.Tensor | None
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor | None
    head: Linear | None


def packed_parts(
    config: ModelConfig,
    checkpoint: Mapping[str, torch.Tensor],
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Part]]:
    """Every part of a model under its name, packed by `ops`. `checkpoint` has Hugging Face's names.

    Raises `StartupError` for missing weights and wrong shapes.
    """
    reader = _Reader(config, checkpoint, ops, device, dtype)
    if config.has_embedding:
        yield "embedding", reader.embedding
    for index in range(config.num_layers):
        for name, part in reader.layer(index):
            yield f"layers.{index}.{name}", part
    if config.has_head:
        yield "norm", reader.take("model.norm.weight", config.hidden_size)
        yield "head", ops.pack_head(reader.embedding if config.tie_word_embeddings else reader.head())


def assemble(config: ModelConfig, parts: Mapping[str, Part]) -> ModelWeights:
    """The model from all of its parts."""
    layers = []
    for index in range(config.num_layers):
        prefix = f"layers.{index}."
        mine = {name.removeprefix(prefix): part for name, part in parts.items() if name.startswith(prefix)}
        layers.append(_assemble_layer(mine, config.experts[index]))
    return ModelWeights(parts.get("embedding"), tuple(layers), parts.get("norm"), parts.get("head"))  # type: ignore[arg-type]


def _assemble_layer(parts: dict[str, Part], experts: ExpertsConfig | None) -> LayerWeights:
    def take(*names: str) -> Any:
        return {name: parts.pop(name) for name in names}

    mlp: MlpWeights | ExpertWeights
    if experts is None:
        mlp = MlpWeights(**take("gate_up", "down"))
    else:
        mlp = ExpertWeights(experts, **take("router", "gate_ups", "downs"))
    return LayerWeights(mlp=mlp, **take(*parts))


def pack_weights(
    config: ModelConfig,
    checkpoint: Mapping[str, torch.Tensor],
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
) -> ModelWeights:
    """The whole model in this process's own memory. As `packed_parts`."""
    return assemble(config, dict(packed_parts(config, checkpoint, ops, device, dtype)))


class _Reader:
    """Takes weights by name, checks their shapes, and fuses what is multiplied together."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Mapping[str, torch.Tensor],
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._ops = ops
        self._device = device
        self._dtype = dtype

    def take(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._checkpoint:
            raise StartupError(f"the checkpoint lacks the weight {name!r}; is it complete?")
        weight = self._checkpoint[name]
        if tuple(weight.shape) != shape:
            raise StartupError(f"the weight {name!r} is {tuple(weight.shape)}; config.json implies {shape}")
        return weight.to(self._device, self._dtype)

    @cached_property
    def embedding(self) -> torch.Tensor:
        """Taken once: a head that is tied to it shares its memory."""
        return self.take("model.embed_tokens.weight", self._config.vocab_size, self._config.hidden_size)

    def head(self) -> torch.Tensor:
        return self.take("lm_head.weight", self._config.vocab_size, self._config.hidden_size)

    def layer(self, index: int) -> Iterator[tuple[str, Part]]:
        config = self._config
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        hidden, experts = config.hidden_size, config.experts[index]
        qkv = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        yield "input_norm", self.take(f"{prefix}.input_layernorm.weight", hidden)
        yield "qkv", self._fuse(attention, qkv, hidden, config.qkv_bias)
        if config.qk_norm:
            yield "q_norm", self.take(f"{attention}.q_norm.weight", config.head_dim)
            yield "k_norm", self.take(f"{attention}.k_norm.weight", config.head_dim)
        yield "output", self._fuse(attention, {"o_proj": hidden}, query_size, config.output_bias)
        yield "mlp_norm", self.take(f"{prefix}.post_attention_layernorm.weight", hidden)
        yield from self._mlp(mlp) if experts is None else self._experts(mlp, experts)

    def _mlp(self, prefix: str) -> Iterator[tuple[str, Part]]:
        hidden, inner, bias = (
            self._config.hidden_size,
            self._config.intermediate_size,
            self._config.mlp_bias,
        )
        gate_up = {"gate_proj": inner, "up_proj": inner}
        yield "gate_up", self._fuse(prefix, gate_up, hidden, bias, self._ops.pack_gate_up)
        yield "down", self._fuse(prefix, {"down_proj": hidden}, inner, bias)

    def _experts(self, prefix: str, experts: ExpertsConfig) -> Iterator[tuple[str, Part]]:
        """Each expert's matrices are made when the ops ask for them."""
        hidden, inner = self._config.hidden_size, experts.intermediate_size
        gate_up = {"gate_proj": inner, "up_proj": inner}
        prefixes = [f"{prefix}.experts.{expert}" for expert in experts.held]
        yield "router", self._ops.pack_head(self.take(f"{prefix}.gate.weight", experts.num_experts, hidden))
        gate_ups = (self._stacked(each, gate_up, hidden) for each in prefixes)
        downs = (self.take(f"{each}.down_proj.weight", hidden, inner) for each in prefixes)
        yield "gate_ups", self._ops.pack_gate_ups(gate_ups, len(prefixes))
        yield "downs", self._ops.pack_downs(downs, len(prefixes))

    def _fuse(
        self,
        prefix: str,
        out_sizes: Mapping[str, int],
        in_size: int,
        has_bias: bool,
        pack: Callable[[torch.Tensor, torch.Tensor | None], Linear] | None = None,
    ) -> Linear:
        """Stack the named matrices along their outputs and pack them."""
        pack = pack or self._ops.pack
        weight = self._stacked(prefix, out_sizes, in_size)
        if not has_bias:
            return pack(weight, None)
        biases = [self.take(f"{prefix}.{name}.bias", size) for name, size in out_sizes.items()]
        return pack(weight, _stack(biases))

    def _stacked(self, prefix: str, out_sizes: Mapping[str, int], in_size: int) -> torch.Tensor:
        """The named matrices, along their outputs."""
        return _stack(
            [self.take(f"{prefix}.{name}.weight", size, in_size) for name, size in out_sizes.items()]
        )


def _stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
