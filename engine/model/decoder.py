"""The decoder-only transformer that all supported architectures are, told apart by `ModelConfig`.

    tokens -> embed -> [ norm -> qkv -> rope -> attention -> output -> norm -> gate_up -> down ] x layers
           -> norm -> head -> logits of the sampled rows

The residual stream `x` is added to in place; every norm follows an addition, so both are one op.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.model.config import ModelConfig
from engine.model.partition import Partition, Whole
from engine.model.rope import rope_tables
from engine.model.weights import ExpertWeights, LayerWeights, MlpWeights, ModelWeights
from engine.ops import Ops, RotatingAttention, StepAttention


@dataclass(frozen=True, slots=True)
class Embedded:
    """What the first layer takes; the layers overwrite it."""

    residual: torch.Tensor  # [rows, hidden]
    cos: torch.Tensor  # [rows, head_dim]
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class HiddenState:
    """What the last layer leaves, both [rows, hidden]; the norm and the head come per wanted row."""

    delta: torch.Tensor | None
    residual: torch.Tensor


class DecoderModel:
    """Computes logits from token ids, positions and a paged cache. Stateless between calls."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: Ops,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_model_len: int | None = None,
        partition: Partition | None = None,
    ) -> None:
        """`weights` were packed by `ops`. With a `partition`, `config` and `weights` are one rank's."""
        self.config = config
        self.ops = ops
        self.device = device
        self.dtype = dtype
        self.max_model_len = max_model_len or config.max_model_len
        self.partition = partition or Whole()
        self._weights = weights
        no_words = torch.empty(0, config.hidden_size, dtype=dtype, device=device)
        self._embedding = no_words if weights.embedding is None else weights.embedding
        self.num_layers_run = 0
        """Over all calls: shows that a long one gets on."""
        cos, sin = rope_tables(config.rope, config.head_dim, self.max_model_len, dtype)
        self._cos, self._sin = cos.to(device), sin.to(device)

    @property
    def waits(self) -> bool:
        """A pass depends on more than its sizes: on the host, experts are told who is routed to them."""
        return self.ops.experts_wait and any(experts is not None for experts in self.config.experts)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention
    ) -> HiddenState:
        """Write the KV of all rows; return what `logits` needs.

        `token_ids` and `positions` are int64 [rows], a multiple of `ops.row_multiple`. Call it under
        `torch.inference_mode`.
        """
        hidden = self.layers(self.embed(token_ids, positions), attention)
        self.partition.hand_on(hidden.delta, hidden.residual)
        return hidden

    def embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> Embedded:
        return Embedded(
            self.partition.embed(self._embedding, token_ids),
            self._cos.index_select(0, positions),
            self._sin.index_select(0, positions),
        )

    def embed_into(self, embedded: Embedded, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """For models of one rank."""
        torch.index_select(self._embedding, 0, token_ids, out=embedded.residual)
        torch.index_select(self._cos, 0, positions, out=embedded.cos)
        torch.index_select(self._sin, 0, positions, out=embedded.sin)

    def layers(self, embedded: Embedded, attention: StepAttention) -> HiddenState:
        """Uses nothing but the ops and views unless `waits`, so that it can be recorded where one rank does
        it all.
        """
        residual, rotation = embedded.residual, (embedded.cos, embedded.sin)
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            x, residual = self._add_norm(delta, residual, layer.input_norm)
            x = self._attend(index, x, rotation, attention)
            x, residual = self._add_norm(x, residual, layer.mlp_norm)
            delta = self.partition.add_up(self._mlp(layer.mlp, x))
            self.num_layers_run += 1
        return HiddenState(delta, residual)

    def logits(self, hidden: HiddenState, rows: torch.Tensor) -> torch.Tensor:
        """The float32 logits [len(rows), vocab] of some rows (int64, a multiple of `ops.row_multiple`)."""
        if not len(rows):
            return torch.empty(0, self.config.vocab_size, device=self.device)
        delta = None if hidden.delta is None else hidden.delta.index_select(0, rows)
        return self.all_logits(HiddenState(delta, hidden.residual.index_select(0, rows)))

    def all_logits(self, hidden: HiddenState) -> torch.Tensor:
        """The float32 logits [rows, vocab] of all rows; overwrites `hidden`. Recorded as `layers`."""
        norm, head = self._weights.norm, self._weights.head
        if norm is None or head is None:  # they are a later stage's
            return self.partition.collect(torch.empty(len(hidden.residual), 0, device=self.device))
        x, _ = self._add_norm(hidden.delta, hidden.residual, norm)
        return self.partition.collect(self.ops.logits(x, head))

    def _add_norm(
        self, delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        eps = self.config.rms_norm_eps
        if delta is None:
            return self.ops.rms_norm(residual, weight, eps), residual
        return self.ops.add_rms_norm(delta, residual, weight, eps)

    def _mlp(self, mlp: MlpWeights | ExpertWeights, x: torch.Tensor) -> torch.Tensor:
        if isinstance(mlp, MlpWeights):
            return self.ops.linear(self.ops.gated(x, mlp.gate_up), mlp.down)
        config = mlp.config
        logits = self.ops.logits(x, mlp.router)
        routing = self.ops.route(logits, config.num_per_token, normalizes=config.normalizes)
        return self.ops.experts(x, routing, mlp.gate_ups, mlp.downs, config.held.start)

    def _attend(
        self,
        index: int,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attention: StepAttention,
    ) -> torch.Tensor:
        config, layer = self.config, self._weights.layers[index]
        heads = self.ops.linear(x, layer.qkv).view(x.shape[0], -1, config.head_dim)
        self._normalise_heads(layer, heads)
        if isinstance(attention, RotatingAttention):
            queries = attention.rotate_and_write(index, heads, config.num_heads, *rotation)
        else:
            queries = self._rotate_then_write(index, heads, rotation, attention)
        attended = attention.attend(index, queries, config.windows[index])
        return self.partition.add_up(self.ops.linear(attended.view(x.shape[0], -1), layer.output))

    def _rotate_then_write(
        self,
        index: int,
        heads: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attention: StepAttention,
    ) -> torch.Tensor:
        num_heads = self.config.num_heads
        values_start = num_heads + self.config.num_kv_heads
        rotated = self.ops.rope(heads[:, :values_start], *rotation)
        attention.write(index, rotated[:, num_heads:], heads[:, values_start:])
        return rotated[:, :num_heads]

    def _normalise_heads(self, layer: LayerWeights, heads: torch.Tensor) -> None:
        if layer.q_norm is None or layer.k_norm is None:
            return
        eps, num_heads, num_kv_heads = (
            self.config.rms_norm_eps,
            self.config.num_heads,
            self.config.num_kv_heads,
        )
        self.ops.rms_norm_(heads[:, :num_heads], layer.q_norm, eps)
        self.ops.rms_norm_(heads[:, num_heads : num_heads + num_kv_heads], layer.k_norm, eps)
