"""What do ranks exchange within one pass of a model? Embedded rows, two sums a layer, and logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.parallel.communicator import Communicator
from engine.parallel.shard import Shard
from protocol.rank_layout import split


class RankPartition:
    """Implements `engine.model.partition.Partition` for one rank of several."""

    is_whole = False

    def __init__(self, shard: Shard, communicator: Communicator) -> None:
        self._words = shard.words
        self._widths = [
            len(words) for words in split(shard.whole.vocab_size, shard.layout.tensor_parallel_size)
        ]
        self._communicator = communicator

    def embed(self, embedding: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Every row is one rank's and zero on the others, so that the sum is exact."""
        places = token_ids - self._words.start
        is_elsewhere = (places < 0) | (places >= len(self._words))
        rows = embedding.index_select(0, places.masked_fill(is_elsewhere, 0))
        return self._communicator.all_reduce(rows.masked_fill_(is_elsewhere.unsqueeze(1), 0))

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        return self._communicator.all_reduce(x)

    def hand_on(self, delta: torch.Tensor | None, residual: torch.Tensor) -> None:
        """Not yet."""

    def collect(self, logits: torch.Tensor) -> torch.Tensor:
        """Ranks may have one word more than others: all send as much as the widest."""
        padded = F.pad(logits, (0, max(self._widths) - logits.shape[1]))
        parts = self._communicator.gather(padded)
        if not parts:
            return logits
        return torch.cat([part[:, :width] for part, width in zip(parts, self._widths, strict=True)], dim=1)
