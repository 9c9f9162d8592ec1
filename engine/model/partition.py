"""The seam for models that several ranks share: what they do together within one pass."""

from __future__ import annotations

from typing import Protocol

import torch


class Partition(Protocol):
    """Of a model whose layers are dealt out to stages; heads, MLP columns and words to the ranks of each.

    All ranks make the same calls in the same order, but that they add up as often as they have layers.
    Whatever is computed between the calls is a rank's own.
    """

    @property
    def is_whole(self) -> bool:
        """There is one rank: the calls do nothing that a recording would miss."""

    def embed(self, embedding: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """What this rank's first layer takes, rows [tokens, hidden] for all of `token_ids`.

        `embedding` has this rank's words; none on a stage that takes what the one before it handed on.
        """

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over a stage's ranks, on each of them; may overwrite `x` [rows, hidden]."""

    def hand_on(self, delta: torch.Tensor | None, residual: torch.Tensor) -> None:
        """The sum of what this rank's last layer leaves, both [rows, hidden], to the next stage, if any.

        May overwrite `residual` where there is one.
        """

    def collect(self, logits: torch.Tensor) -> torch.Tensor:
        """From this rank's words [rows, words] to all of them, [rows, vocab], on rank 0.

        There are no words where the head is another stage's. What the others get means nothing.
        """


class Whole:
    """The partition of a model that one rank has to itself."""

    is_whole = True

    def embed(self, embedding: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return embedding.index_select(0, token_ids)

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def hand_on(self, delta: torch.Tensor | None, residual: torch.Tensor) -> None:
        """There is no other stage."""

    def collect(self, logits: torch.Tensor) -> torch.Tensor:
        return logits
