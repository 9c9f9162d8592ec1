"""The seam between the model and the arithmetic: what every implementation of the ops must offer.

Implementations are twins: same names, same signatures, and (in float32 on a CPU) the same bits for a
row whatever other rows, sequences or chunks share the step. The torch one is the oracle of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from protocol.generation import SamplingParams

Matrices = Iterable[torch.Tensor]
"""Made one at a time, when they are asked for."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight matrix in the format of the ops that packed it; of use to nobody else."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_features: int


@dataclass(frozen=True, slots=True)
class LinearStack:
    """Equally large matrices without biases, in the format of the ops that packed them."""

    weights: Sequence[torch.Tensor] | torch.Tensor  # [matrices, ...]; a tensor where it is plain memory
    out_features: int

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, index: int) -> Linear:
        return Linear(self.weights[index], None, self.out_features)


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts each row passes. A row's order is by expert: in it their results are added up."""

    experts: torch.Tensor  # int64 [rows, chosen], ascending
    weights: torch.Tensor  # float32 [rows, chosen]


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where the tokens of one step lie: query rows, positions and KV blocks, on the host.

    Sequence `i` owns the rows `query_starts[i]:query_starts[i + 1]`; they are its last tokens, so that
    its first row has position `context_lens[i] - num_queries[i]`. Rows past `query_starts[-1]` are
    padding: they write to the null block, and what is computed for them means nothing.
    """

    query_starts: npt.NDArray[np.int32]  # [sequences + 1]
    context_lens: npt.NDArray[np.int32]  # [sequences], tokens in the cache once this step is written
    block_tables: npt.NDArray[np.int32]  # [sequences, max blocks], padded with the null block
    positions: npt.NDArray[np.int64]  # [rows]
    slots: npt.NDArray[np.int64]  # [rows], block id * block size + offset in the block

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    @property
    def num_rows(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True)
class Recording:
    """Work that was done once, and can be done again on whatever its inputs hold by then."""

    output: torch.Tensor
    """What the work returned; overwritten by every `run`."""
    run: Callable[[], None]


class StepAttention(Protocol):
    """The attention of one step over one cache. Prepared once, used by every layer in turn."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put the step's keys and values, [rows, kv_heads, head_dim], into their slots."""

    def attend(self, layer: int, queries: torch.Tensor, window: int | None) -> torch.Tensor:
        """Causal attention of `queries` [rows, heads, head_dim] over the cache; same shape back.

        With a `window` a token sees the last `window` positions, its own included. Scores are scaled
        by 1/sqrt(head_dim). `write` of the same layer comes first. Slots that no query of a sequence
        may see can hold anything, NaN included: a failed transfer leaves what it will in freed blocks.
        """


@runtime_checkable
class RotatingAttention(StepAttention, Protocol):
    """Attention that rotates and writes in one go."""

    def rotate_and_write(
        self, layer: int, heads: torch.Tensor, num_heads: int, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """As `Ops.rope` of queries and keys, then `write`; returns the queries [rows, num_heads, head_dim].

        `heads` [rows, num_heads + 2 * kv_heads, head_dim] holds queries, keys and values, and may be
        overwritten.
        """


@runtime_checkable
class UploadedAttention(StepAttention, Protocol):
    """Attention that reads its layout first, and then works on the device alone, so it can be captured.

    The work depends on the layout's sizes only, when all its sequences have one query.
    """

    def upload(self) -> object:
        """Read the layout, anew if it was read before: into the same memory, for captured work to find."""


class Ops(Protocol):
    """The arithmetic of a decoder. Stateless but for scratch memory; used by one thread."""

    @property
    def packing(self) -> str | None:
        """Names the format of what is packed, so that it can be kept; None: it is no plain memory."""

    @property
    def name(self) -> str:
        """For people: what computes."""

    @property
    def row_multiple(self) -> int:
        """Callers pad the rows they pass to `linear` and `logits` to a multiple of this."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Bring `weight` [out, in] into the fastest format for `linear`."""

    def pack_head(self, weight: torch.Tensor) -> Linear:
        """Bring the vocabulary matrix [vocab, in] into the format for `logits`."""

    def pack_gate_up(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Bring `weight` [2 * width, in], gate above up, into the fastest format for `gated`."""

    def pack_gate_ups(self, matrices: Matrices, count: int) -> LinearStack:
        """Bring those of experts, each as for `pack_gate_up`, into the fastest format for `experts`."""

    def pack_downs(self, matrices: Matrices, count: int) -> LinearStack:
        """Bring those of experts, [out, width] each, into the fastest format for `experts`."""

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """[rows, in] -> [rows, out]."""

    def gated(self, x: torch.Tensor, gate_up: Linear) -> torch.Tensor:
        """[rows, in] -> silu(gate @ x) * (up @ x), [rows, width]."""

    @property
    def experts_wait(self) -> bool:
        """Whether `experts` learns on the host who is routed where: such work cannot be done again."""

    def route(self, logits: torch.Tensor, num_chosen: int, *, normalizes: bool) -> Routing:
        """Choose by softmax over all experts, of `logits` float32 [rows, experts]; of equals the first.

        With `normalizes` a row's weights add up to 1.
        """

    def experts(
        self, x: torch.Tensor, routing: Routing, gate_up: LinearStack, down: LinearStack, first: int = 0
    ) -> torch.Tensor:
        """The weighted sum of the gated MLPs that each row is routed to: [rows, in] -> [rows, in].

        The stacks are those of experts from `first` on; what others would give is left out. Added up in
        float32 in the order of experts.
        """

    def logits(self, x: torch.Tensor, head: Linear) -> torch.Tensor:
        """[rows, in] -> [rows, vocab] in float32, whatever the type of `x`: bfloat16 makes ties."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise the last dimension."""

    def rms_norm_(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """Normalise the last dimension in place; `x` may be a view."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (normalised sum, sum) of `x` and `residual`; may overwrite both arguments."""

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate `x` [rows, heads, head_dim], halves against each other; may overwrite it.

        `cos` and `sin` are [rows, head_dim]; the first half of `sin` is negated already.
        """

    def attention(self, layout: BatchLayout, kv_blocks: torch.Tensor) -> StepAttention:
        """Prepare one step over `kv_blocks` [blocks, layers, 2, kv_heads, block_size, head_dim].

        The layout's arrays are read when the step is computed, not here.
        """

    @property
    def attention_waits(self) -> bool:
        """Whether attention groups or plans a step's sequences on the host: no graph can hold it."""


@runtime_checkable
class Drawer(Protocol):
    """Ops that choose tokens, too."""

    def draw(
        self,
        logits: torch.Tensor,
        params: Sequence[SamplingParams],
        noise: npt.NDArray[np.float64],
    ) -> list[int]:
        """As `engine.sampling.draw_with_torch`."""


@runtime_checkable
class Recorder(Protocol):
    """Ops that can repeat what they did without being called one by one."""

    def record(self, work: Callable[[], torch.Tensor]) -> Recording:
        """Do `work`, which computes with these ops and views alone.

        Its inputs, layouts included, are memory that the caller keeps, and fills anew before each run.
        """
