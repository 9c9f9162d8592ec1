"""Which log-probabilities does a token report? Those of the raw distribution, before any adjustment."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from engine.sequence import Sequence
from protocol.generation import Token

Best = tuple[tuple[int, float], ...]


class Reports:
    """The log-probabilities of a batch, kept for those rows whose sequences ask for them."""

    def __init__(self, logits: torch.Tensor, sequences: Items[Sequence]) -> None:
        """`logits` [sequences, vocab] may be overwritten afterwards."""
        wanted = [(row, s.sampling.logprobs) for row, s in enumerate(sequences)]
        self._num_best = {row: num_best for row, num_best in wanted if num_best is not None}
        self._logprobs: torch.Tensor | None = None
        if self._num_best:
            self._logprobs = torch.log_softmax(logits[list(self._num_best)], dim=-1)

    def tokens(self, token_ids: Items[int]) -> list[Token]:
        """`token_ids`: the one chosen per row."""
        tokens = [Token(token_id) for token_id in token_ids]
        if self._logprobs is not None:
            rows = list(self._num_best)
            chosen = [token_ids[row] for row in rows]
            described = describe(self._logprobs, chosen, list(self._num_best.values()))
            for row, token in zip(rows, described, strict=True):
                tokens[row] = token
        return tokens


def describe(logprobs: torch.Tensor, token_ids: Items[int], num_best: Items[int]) -> list[Token]:
    """The token of each row of `logprobs` [rows, vocab], with its own and the row's best ones'."""
    ids = torch.tensor(token_ids, device=logprobs.device)[:, None]
    chosen: list[float] = logprobs.gather(1, ids)[:, 0].tolist()
    best = _best(logprobs, num_best)
    return [Token(*parts) for parts in zip(token_ids, chosen, best, strict=True)]


def _best(logprobs: torch.Tensor, num_best: Items[int]) -> list[Best]:
    """Of each row as many (token id, log-probability) as it asks for: best first, ties by id."""
    vocab_size = logprobs.shape[1]
    most = min(max(num_best), vocab_size)
    if not most:
        return [()] * len(num_best)
    # One more than asked for shows whether equal ones were left out, and which ones those are is
    # the sort's whim: it may depend on how many others are asked for in this batch.
    values, ids = torch.topk(logprobs, min(most + 1, vocab_size))
    result: list[Best] = []
    for row, (row_values, row_ids) in enumerate(zip(values.tolist(), ids.tolist(), strict=True)):
        count = min(num_best[row], vocab_size)
        is_cut = 0 < count < len(row_values) < vocab_size and row_values[count - 1] == row_values[-1]
        pairs = (
            _at_least(logprobs[row], row_values[-1]) if is_cut else zip(row_ids, row_values, strict=True)
        )
        result.append(tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count]))
    return result


def _at_least(logprobs: torch.Tensor, lowest: float) -> list[tuple[int, float]]:
    ids = (logprobs >= lowest).nonzero()[:, 0]
    return list(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
