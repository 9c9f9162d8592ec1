"""What do ranks exchange within one pass of a model? Embedded rows, two sums a layer, and logits.

stage 0     embed, layers --sum of delta and residual--> stage 1: layers --> ... --> the last: layers,
rank 0      <------------------------------------logits of the rows that are due------------- and head
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.parallel.groups import RankGroups
from engine.parallel.shard import Shard
from protocol.rank_layout import split


class RankPartition:
    """Implements `engine.model.partition.Partition` for one rank of several."""

    is_whole = False

    def __init__(self, shard: Shard, groups: RankGroups) -> None:
        self._words = shard.words
        self._vocab_size = shard.whole.vocab_size
        self._widths = [len(words) for words in split(self._vocab_size, shard.layout.tensor_parallel_size)]
        self._groups = groups

    def embed(self, embedding: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Every row is at one place and zero at the others, so that the sum is exact."""
        if (before := self._groups.before) is not None:
            handed_on = embedding.new_empty(len(token_ids), embedding.shape[1])
            before.broadcast(handed_on)
            return handed_on
        places = token_ids - self._words.start
        is_elsewhere = (places < 0) | (places >= len(self._words))
        rows = embedding.index_select(0, places.masked_fill(is_elsewhere, 0))
        return self._groups.stage.all_reduce(rows.masked_fill_(is_elsewhere.unsqueeze(1), 0))

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        return self._groups.stage.all_reduce(x)

    def hand_on(self, delta: torch.Tensor | None, residual: torch.Tensor) -> None:
        """The sum, which the next norm would take first of all, is half of both."""
        if (after := self._groups.after) is not None:
            after.broadcast(residual if delta is None else residual.add_(delta))

    def collect(self, logits: torch.Tensor) -> torch.Tensor:
        groups = self._groups
        if groups.after is None:
            logits = self._join_words(logits)
        if groups.result is None:
            return logits
        if groups.before is None:  # the leader
            logits = logits.new_empty(len(logits), self._vocab_size)
        logits = logits.contiguous()
        groups.result.broadcast(logits)
        return logits

    def _join_words(self, logits: torch.Tensor) -> torch.Tensor:
        """Ranks may have one word more than others: all send as much as the widest."""
        padded = F.pad(logits, (0, max(self._widths) - logits.shape[1]))
        parts = self._groups.stage.gather(padded)
        if not parts:
            return logits
        return torch.cat([part[:, :width] for part, width in zip(parts, self._widths, strict=True)], dim=1)
