"""The decoder-only transformer that all supported architectures are, told apart by `ModelConfig`.

    tokens -> embed -> [ norm -> qkv -> rope -> attention -> output -> norm -> gate_up -> down ] x layers
           -> norm -> head -> logits of the sampled rows

The residual stream `x` is added to in place; every norm follows an addition, so both are one op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.model.config import ModelConfig
from engine.model.rope import rope_tables
from engine.ops import Linear, Ops, StepAttention
from protocol.errors import StartupError


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of one layer, fused and packed."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    window: int | None


@dataclass(frozen=True, slots=True)
class HiddenState:
    """What the last layer leaves, both [rows, hidden]; the norm and the head come per wanted row."""

    delta: torch.Tensor | None
    residual: torch.Tensor


class DecoderModel:
    """Computes logits from token ids, positions and a paged cache. Stateless between calls.

    `weights` has Hugging Face's names; it is read once and not kept. Raises `StartupError` for missing
    weights and wrong shapes.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        ops: Ops,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_model_len: int | None = None,
    ) -> None:
        self.config = config
        self.ops = ops
        self.device = device
        self.dtype = dtype
        self.max_model_len = max_model_len or config.max_model_len
        self.num_layers_run = 0
        """Over all calls of `forward`: shows that a long one gets on."""
        reader = _WeightReader(config, weights, ops, device, dtype)
        self._embedding = reader.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [reader.layer(index) for index in range(config.num_layers)]
        self._norm = reader.take("model.norm.weight", config.hidden_size)
        self._head = ops.pack_head(self._embedding if config.tie_word_embeddings else reader.head())
        cos, sin = rope_tables(config.rope, config.head_dim, self.max_model_len, dtype)
        self._cos, self._sin = cos.to(device), sin.to(device)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention
    ) -> HiddenState:
        """Write the KV of all rows; return what `logits` needs.

        `token_ids` and `positions` are int64 [rows], a multiple of `ops.row_multiple`. Call it under
        `torch.inference_mode`.
        """
        residual = self._embedding.index_select(0, token_ids)
        rotation = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            x, residual = self._add_norm(delta, residual, layer.input_norm)
            x = self._attend(index, x, rotation, attention)
            x, residual = self._add_norm(x, residual, layer.mlp_norm)
            delta = self.ops.linear(self.ops.gated(x, layer.gate_up), layer.down)
            self.num_layers_run += 1
        return HiddenState(delta, residual)

    def logits(self, hidden: HiddenState, rows: torch.Tensor) -> torch.Tensor:
        """The float32 logits [len(rows), vocab] of some rows (int64, a multiple of `ops.row_multiple`)."""
        if not len(rows):
            return torch.empty(0, self.config.vocab_size, device=self.device)
        delta = None if hidden.delta is None else hidden.delta.index_select(0, rows)
        x, _ = self._add_norm(delta, hidden.residual.index_select(0, rows), self._norm)
        return self.ops.logits(x, self._head)

    def _add_norm(
        self, delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        eps = self.config.rms_norm_eps
        if delta is None:
            return self.ops.rms_norm(residual, weight, eps), residual
        return self.ops.add_rms_norm(delta, residual, weight, eps)

    def _attend(
        self,
        index: int,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attention: StepAttention,
    ) -> torch.Tensor:
        config, layer = self.config, self._layers[index]
        heads = self.ops.linear(x, layer.qkv).view(x.shape[0], -1, config.head_dim)
        values_start = config.num_heads + config.num_kv_heads
        rotated = self._normalise_heads(layer, heads[:, :values_start])
        rotated = self.ops.rope(rotated, *rotation)
        attention.write(index, rotated[:, config.num_heads :], heads[:, values_start:])
        attended = attention.attend(index, rotated[:, : config.num_heads], layer.window)
        return self.ops.linear(attended.view(x.shape[0], -1), layer.output)

    def _normalise_heads(self, layer: _Layer, queries_keys: torch.Tensor) -> torch.Tensor:
        if layer.q_norm is None or layer.k_norm is None:
            return queries_keys
        eps, num_heads = self.config.rms_norm_eps, self.config.num_heads
        queries = self.ops.rms_norm(queries_keys[:, :num_heads], layer.q_norm, eps)
        keys = self.ops.rms_norm(queries_keys[:, num_heads:], layer.k_norm, eps)
        return torch.cat([queries, keys], 1)


class _WeightReader:
    """Takes weights by name, checks their shapes, and fuses what is multiplied together."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._weights = weights
        self._ops = ops
        self._device = device
        self._dtype = dtype

    def take(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._weights:
            raise StartupError(f"the checkpoint lacks the weight {name!r}; is it complete?")
        weight = self._weights[name]
        if tuple(weight.shape) != shape:
            raise StartupError(f"the weight {name!r} is {tuple(weight.shape)}; config.json implies {shape}")
        return weight.to(self._device, self._dtype)

    def head(self) -> torch.Tensor:
        return self.take("lm_head.weight", self._config.vocab_size, self._config.hidden_size)

    def layer(self, index: int) -> _Layer:
        config = self._config
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        qkv = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        return _Layer(
            input_norm=self.take(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._fuse(attention, qkv, hidden, config.qkv_bias),
            q_norm=self._head_norm(f"{attention}.q_norm.weight"),
            k_norm=self._head_norm(f"{attention}.k_norm.weight"),
            output=self._fuse(attention, {"o_proj": hidden}, query_size, config.output_bias),
            mlp_norm=self.take(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self._fuse(
                mlp, {"gate_proj": inner, "up_proj": inner}, hidden, config.mlp_bias, self._ops.pack_gate_up
            ),
            down=self._fuse(mlp, {"down_proj": hidden}, inner, config.mlp_bias),
            window=config.windows[index],
        )

    def _head_norm(self, name: str) -> torch.Tensor | None:
        return self.take(name, self._config.head_dim) if self._config.qk_norm else None

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
        weights = [self.take(f"{prefix}.{name}.weight", size, in_size) for name, size in out_sizes.items()]
        if not has_bias:
            return pack(_stack(weights), None)
        biases = [self.take(f"{prefix}.{name}.bias", size) for name, size in out_sizes.items()]
        return pack(_stack(weights), _stack(biases))


def _stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
