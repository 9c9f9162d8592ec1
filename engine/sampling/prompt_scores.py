"""How likely was each token of a prompt, given those before it?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch

from engine.plan import Slice
from engine.sampling.logprobs import describe
from protocol.generation import Token

MAX_ROWS = 128
"""Logits held at once: a whole prompt's would be gigabytes."""


def score_prompts(
    slices: Items[Slice],
    query_starts: npt.NDArray[np.int32],
    logits_of: Callable[[npt.NDArray[np.int64]], torch.Tensor],
) -> dict[int, list[Token]]:
    """By position of the slice: the prompt tokens that follow its rows, scored as the sequence asks.

    `query_starts` are the slices' first rows; `logits_of` gives the float32 logits [rows, vocab] of
    some. Scores are NaN where logits hold it: see `are_usable`.
    """
    counts = _counts(slices)
    if not counts:
        return {}
    rows = scored_rows(slices, query_starts)
    sequences = [slices[i].sequence for i in counts]
    token_ids: list[int] = []
    num_best: list[int] = []
    for sequence, count in zip(sequences, counts.values(), strict=True):
        first = sequence.num_computed + 1
        token_ids += sequence.token_ids[first : first + count]
        num_best += [sequence.sampling.prompt_logprobs or 0] * count
    tokens = _score_rows(rows, token_ids, num_best, logits_of)
    return {i: list(islice(tokens, count)) for i, count in counts.items()}


def scored_rows(slices: Items[Slice], query_starts: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """The rows whose logits `score_prompts` asks for, MAX_ROWS at a time, in order."""
    counts = _counts(slices)
    rows = [query_starts[i] + np.arange(count) for i, count in counts.items()]
    return np.concatenate(rows).astype(np.int64) if rows else np.empty(0, dtype=np.int64)


def are_usable(scores: Items[Token]) -> bool:
    """All are numbers. A token may be impossible; that is minus infinity."""
    return not any(token.logprob is None or math.isnan(token.logprob) for token in scores)


def _counts(slices: Items[Slice]) -> dict[int, int]:
    """By position of the slice, where there are any: rows that are scored."""
    return {i: _num_scored(part) for i, part in enumerate(slices) if _is_scored(part)}


def _is_scored(part: Slice) -> bool:
    """Some of the slice's rows are followed by a prompt token that was not scored before."""
    sequence = part.sequence
    if sequence.sampling.prompt_logprobs is None:
        return False
    end = sequence.num_computed + _num_scored(part)
    return end > max(sequence.num_computed, sequence.num_scored)


def _num_scored(part: Slice) -> int:
    """Rows of the slice that a prompt token follows."""
    sequence = part.sequence
    return min(part.num_tokens, sequence.num_prompt_tokens - 1 - sequence.num_computed)


def _score_rows(
    rows: npt.NDArray[np.int64],
    token_ids: list[int],
    num_best: list[int],
    logits_of: Callable[[npt.NDArray[np.int64]], torch.Tensor],
) -> Iterator[Token]:
    for start in range(0, len(rows), MAX_ROWS):
        stop = start + MAX_ROWS
        logprobs = torch.log_softmax(logits_of(rows[start:stop]), dim=-1)
        yield from describe(logprobs, token_ids[start:stop], num_best[start:stop])
