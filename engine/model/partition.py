"""The seam for models that several ranks share: what they do together within one pass."""

from __future__ import annotations

from typing import Protocol

import torch


class Partition(Protocol):
    """Of a model whose heads, MLP columns and words are dealt out to ranks.

    All ranks make the same calls in the same order. Whatever is computed between them is a rank's own.
    """

    @property
    def is_whole(self) -> bool:
        """There is one rank: the calls do nothing that a recording would miss."""

    def embed(self, embedding: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """`embedding` has this rank's words. Rows [tokens, hidden] for all of `token_ids`, on each rank."""

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on each of them; may overwrite `x` [rows, hidden]."""

    def collect(self, logits: torch.Tensor) -> torch.Tensor:
        """From this rank's words [rows, words] to all of them, [rows, vocab], on rank 0.

        What the others get means nothing.
        """


class Whole:
    """The partition of a model that one rank has to itself."""

    is_whole = True

    def embed(self, embedding: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return embedding.index_select(0, token_ids)

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def collect(self, logits: torch.Tensor) -> torch.Tensor:
        return logits
