"""What changes logits before a token is chosen: penalties, biases, and bans of early ends.

All of it is sparse: per row a handful of token ids. The order is repetition, frequency and presence,
bias, ban; each step sees the result of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch

from engine.sequence import Sequence
from protocol.generation import SamplingParams


def adjust(logits: torch.Tensor, sequences: Items[Sequence], eos_token_ids: tuple[int, ...]) -> None:
    """Change `logits` [sequences, vocab] in place, as each sequence's parameters ask for."""
    for row, sequence in zip(logits, sequences, strict=True):
        params = sequence.sampling
        if params.repetition_penalty != 1.0:
            _discourage_repetition(row, sequence.token_ids, params.repetition_penalty)
        if params.frequency_penalty or params.presence_penalty:
            _discourage_output(row, sequence)
        if params.logit_bias:
            ids, biases = zip(*params.logit_bias, strict=True)
            _add(row, np.array(ids, dtype=np.int64), np.array(biases, dtype=np.float32))
        if sequence.num_output_tokens < params.min_tokens:
            _ban(row, (*eos_token_ids, *params.stop_token_ids))


def needs_adjustment(sequence: Sequence) -> bool:
    return sequence.num_output_tokens < sequence.sampling.min_tokens or _reshapes(sequence.sampling)


def _reshapes(params: SamplingParams) -> bool:
    return bool(
        params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
        or params.logit_bias
    )


def _discourage_repetition(row: torch.Tensor, token_ids: list[int], penalty: float) -> None:
    """Keskar et al., 2019: shrink the logits of all tokens seen, the prompt's included."""
    ids = torch.from_numpy(np.unique(np.array(token_ids, dtype=np.int64))).to(row.device)
    seen = row.index_select(0, ids)
    row.index_copy_(0, ids, torch.where(seen > 0, seen / penalty, seen * penalty))


def _discourage_output(row: torch.Tensor, sequence: Sequence) -> None:
    """OpenAI's two penalties; they count generated tokens only."""
    output = np.array(sequence.token_ids[sequence.num_prompt_tokens :], dtype=np.int64)
    ids, counts = np.unique(output, return_counts=True)
    params = sequence.sampling
    penalties = params.frequency_penalty * counts + params.presence_penalty
    _add(row, ids, -penalties.astype(np.float32))


def _add(row: torch.Tensor, ids: np.ndarray, values: np.ndarray) -> None:
    row.index_add_(0, torch.from_numpy(ids).to(row.device), torch.from_numpy(values).to(row.device))


def _ban(row: torch.Tensor, token_ids: tuple[int, ...]) -> None:
    if token_ids:
        row.index_fill_(0, torch.tensor(token_ids, device=row.device), float("-inf"))
