"""From logits to tokens, one row per sequence; no row's result depends on the other rows.

    raw logits -> (log-probabilities to report)
               -> adjust -> greedy: argmax, ties to the lowest id
                         -> else:   temperature -> softmax -> cut the tail -> inverse CDF at one uniform

The inverse CDF runs over the tokens in order of id, so no sort's treatment of ties can matter.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from engine.sampling.adjustments import adjust, needs_adjustment
from engine.sampling.filters import thresholds
from engine.sampling.noise import uniforms
from engine.sequence import Sequence
from protocol.errors import EngineFault
from protocol.generation import SamplingParams, Token

MIN_TEMPERATURE = 1e-5
"""Below this, dividing by the temperature says nothing that greedy does not."""


class Sampler:
    """Chooses the next token of each sequence. Stateless."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids

    def sample(self, logits: torch.Tensor, sequences: Items[Sequence]) -> list[Token]:
        """One token per row of `logits` [sequences, vocab], float32, which may be overwritten.

        Raises `EngineFault` when a row holds NaN or nothing that can be chosen.
        """
        if not sequences:
            return []
        reports = _Reports(logits, sequences)
        adjusted = [i for i, sequence in enumerate(sequences) if needs_adjustment(sequence)]
        if adjusted:
            part = logits[adjusted]
            adjust(part, [sequences[i] for i in adjusted], self._eos_token_ids)
            logits[adjusted] = part
        token_ids = _argmax(logits)
        _refuse_unusable(logits.gather(1, token_ids[:, None]), sequences)
        chosen: list[int] = token_ids.tolist()
        noisy = [i for i, sequence in enumerate(sequences) if not _is_greedy(sequence.sampling)]
        if noisy:
            # Not `logits[noisy]`: most often that is all rows, and then it would be a needless copy.
            rows = logits if len(noisy) == len(sequences) else logits[noisy]
            picks = _draw(rows, [sequences[i] for i in noisy])
            for row, token_id in zip(noisy, picks, strict=True):
                chosen[row] = token_id
        return [reports.token(row, token_id) for row, token_id in enumerate(chosen)]


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature < MIN_TEMPERATURE or params.top_k == 1


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """The lowest id of the greatest logit; NaN counts as greatest."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))  # ten times as fast as torch's
    return logits.argmax(dim=-1)


def _refuse_unusable(best: torch.Tensor, sequences: Items[Sequence]) -> None:
    """`best`: [sequences, 1]; argmax takes NaN for the greatest, so a NaN anywhere shows here."""
    usable = torch.isfinite(best)
    if not bool(usable.all()):
        broken = [s.seq_id for s, ok in zip(sequences, usable.tolist(), strict=True) if not ok[0]]
        raise EngineFault(f"no finite best logit for sequences {', '.join(broken)}")


def _draw(logits: torch.Tensor, sequences: Items[Sequence]) -> list[int]:
    params = [sequence.sampling for sequence in sequences]
    temperatures = torch.tensor([[p.temperature] for p in params], device=logits.device)
    # The maximum goes first, lest a small temperature make infinities of large logits.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperatures)
    probabilities = torch.softmax(scaled, dim=-1)
    if any(p.top_p < 1.0 or p.top_k or p.min_p for p in params):
        lowest = thresholds(probabilities, params)
        probabilities = probabilities.masked_fill_(probabilities < lowest, 0.0)
    noise = uniforms([p.seed for p in params], [len(s.token_ids) for s in sequences])
    return _invert(probabilities, torch.from_numpy(noise).to(logits.device))


def _invert(probabilities: torch.Tensor, noise: torch.Tensor) -> list[int]:
    """Per row the first token whose cumulated probability exceeds `noise` [rows] times the row's total.

    float32 will do: it is off by 1e-7 of the total, and a float64 sum takes ten times as long. A token of
    probability 0 does not raise the sum, so it is never the first.
    """
    cumulative = probabilities.cumsum(-1)
    totals = cumulative[:, -1:].contiguous()
    targets = (noise[:, None] * totals).to(totals.dtype)
    # Rounding may lift a target to the total, which no sum exceeds.
    targets = torch.minimum(targets, torch.nextafter(totals, torch.zeros_like(totals)))
    token_ids: list[int] = torch.searchsorted(cumulative, targets, right=True)[:, 0].tolist()
    return token_ids


class _Reports:
    """Log-probabilities of the raw distribution, for the rows whose sequences ask for them."""

    def __init__(self, logits: torch.Tensor, sequences: Items[Sequence]) -> None:
        self._num_best = [sequence.sampling.logprobs for sequence in sequences]
        rows = [i for i, num_best in enumerate(self._num_best) if num_best is not None]
        self._places = {row: place for place, row in enumerate(rows)}
        self._logprobs = torch.log_softmax(logits[rows], dim=-1) if rows else None

    def token(self, row: int, token_id: int) -> Token:
        num_best = self._num_best[row]
        if num_best is None or self._logprobs is None:
            return Token(token_id)
        logprobs = self._logprobs[self._places[row]]
        return Token(token_id, float(logprobs[token_id]), _best(logprobs, num_best))


def _best(logprobs: torch.Tensor, num_best: int) -> tuple[tuple[int, float], ...]:
    """The `num_best` likeliest (token id, log-probability), best first, ties by id."""
    if not num_best:
        return ()
    values, ids = torch.topk(logprobs, min(num_best, len(logprobs)))
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
