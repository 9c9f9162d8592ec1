"""What changes logits before a token is chosen: penalties, biases, and bans.

All of it is sparse: per row a handful of token ids. Each kind is one operation on the cells of all rows
that ask for it; a cell is a place in the logits seen as one flat vector. The order is repetition,
frequency and presence, bias, ban; each step sees the result of the one before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Items
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from engine.sequence import Sequence

Cells = npt.NDArray[np.int64]

BANNED = -1e30
"""Lower than any logit, so that a banned token has the probability 0; but finite, so that a request
which bans all that there is gets some token, and is no fault of the engine."""

LARGEST = 1e30
"""No parameter moves a logit further: a request's infinities would look like those of a broken model."""


def adjust(logits: torch.Tensor, sequences: Items[Sequence], eos_token_ids: tuple[int, ...]) -> None:
    """Change `logits` [sequences, vocab], contiguous, in place, as each sequence's parameters ask for."""
    _discourage_repetition(logits, sequences)
    _discourage_output(logits, sequences)
    _add_biases(logits, sequences)
    _ban(logits, sequences, eos_token_ids)


def _discourage_repetition(logits: torch.Tensor, sequences: Items[Sequence]) -> None:
    """Keskar et al., 2019: shrink the logits of all tokens seen, the prompt's included.

    A token that was seen twice is two cells of one place; both write the same number there.
    """
    seen = {i: s.token_ids for i, s in enumerate(sequences) if s.sampling.repetition_penalty != 1.0}
    if not seen:
        return
    cells = _cells(seen, logits.shape[1])
    penalties = _bounded([s.sampling.repetition_penalty for s in sequences])
    flat, index = logits.view(-1), _to_device(cells, logits)
    penalty = _to_device(penalties[cells // logits.shape[1]].astype(np.float32), logits)
    values = flat.gather(0, index)
    discouraged = torch.where(values > 0, values / penalty, values * penalty)
    flat.scatter_(0, index, discouraged.clamp_(-LARGEST, LARGEST))


def _discourage_output(logits: torch.Tensor, sequences: Items[Sequence]) -> None:
    """OpenAI's two penalties; they count generated tokens only."""
    output = {
        i: s.token_ids[s.num_prompt_tokens :]
        for i, s in enumerate(sequences)
        if s.sampling.frequency_penalty or s.sampling.presence_penalty
    }
    if not output:
        return
    cells, counts = np.unique(_cells(output, logits.shape[1]), return_counts=True)
    rows = cells // logits.shape[1]
    frequency = _bounded([s.sampling.frequency_penalty for s in sequences])[rows]
    presence = _bounded([s.sampling.presence_penalty for s in sequences])[rows]
    _add(logits, cells, -(frequency * counts + presence))


def _add_biases(logits: torch.Tensor, sequences: Items[Sequence]) -> None:
    biases = {i: dict(s.sampling.logit_bias) for i, s in enumerate(sequences) if s.sampling.logit_bias}
    if not biases:
        return
    vocab_size = logits.shape[1]
    values = [
        bias for row in biases.values() for token_id, bias in row.items() if 0 <= token_id < vocab_size
    ]
    _add(logits, _cells(biases, vocab_size), _bounded(values))


def _ban(logits: torch.Tensor, sequences: Items[Sequence], eos_token_ids: tuple[int, ...]) -> None:
    banned: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        params = sequence.sampling
        if sequence.num_output_tokens < params.min_tokens:
            banned[i] = [*eos_token_ids, *params.stop_token_ids]
        if params.bad_words:
            ends = sequence.bad_words.ends_after(sequence.token_ids, sequence.num_prompt_tokens)
            banned.setdefault(i, []).extend(ends)
    if banned:
        index = _to_device(_cells(banned, logits.shape[1]), logits)
        logits.view(-1).index_fill_(0, index, BANNED)


def _cells(token_ids_by_row: Mapping[int, Collection[int]], vocab_size: int) -> Cells:
    """Row by row the places of token ids, in order. Those outside the vocabulary, which nothing can
    choose, are left out: their places are another row's.
    """
    counts = [len(token_ids) for token_ids in token_ids_by_row.values()]
    rows = np.repeat(np.fromiter(token_ids_by_row, dtype=np.int64), counts)
    token_ids = np.fromiter(chain.from_iterable(token_ids_by_row.values()), np.int64, sum(counts))
    is_inside = (token_ids >= 0) & (token_ids < vocab_size)
    return (rows * vocab_size + token_ids)[is_inside]


def _add(logits: torch.Tensor, cells: Cells, values: npt.NDArray[np.float64]) -> None:
    """`cells` has none twice."""
    added = _to_device(values.astype(np.float32), logits)
    logits.view(-1).scatter_add_(0, _to_device(cells, logits), added)


def _bounded(values: list[float]) -> npt.NDArray[np.float64]:
    """The numbers as near as they come to a sane range; NaN is 0."""
    return np.clip(np.nan_to_num(np.array(values, dtype=np.float64)), -LARGEST, LARGEST)


def _to_device(array: npt.NDArray[np.int64] | npt.NDArray[np.float32], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(array).to(like.device)
