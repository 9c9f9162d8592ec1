"""Which requests do the recorded traces hold, and what could their prompts have been?"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data"
HASHED_TOKENS = 512
"""Tokens of the prompt per hash id of the Mooncake trace."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace."""

    arrival_s: float
    prompt: tuple[int, ...]
    num_output_tokens: int


def azure_conversation(num_requests: int = 2000, shrink: int = 1) -> list[TracedRequest]:
    """Lengths divided by `shrink`; no two prompts share a token."""
    requests, start = [], 0
    for row in _rows("azure_2023_conv.csv", num_requests):
        length = max(1, int(row["input_length"]) // shrink)
        requests.append(_request(row, tuple(range(start, start + length)), shrink))
        start += length
    return requests


def mooncake_conversation(num_requests: int = 2000, shrink: int = 16) -> list[TracedRequest]:
    """Lengths divided by `shrink`; equal hash ids give equal tokens, `HASHED_TOKENS / shrink` of each."""
    per_id = HASHED_TOKENS // shrink
    requests = []
    for row in _rows("mooncake_conversation.csv", num_requests):
        tokens = [token for i in _ids(row["hash_ids"]) for token in range(i * per_id, (i + 1) * per_id)]
        length = max(1, int(row["input_length"]) // shrink)
        requests.append(_request(row, tuple(tokens[:length]), shrink))
    return requests


def _request(row: dict[str, str], prompt: tuple[int, ...], shrink: int) -> TracedRequest:
    return TracedRequest(
        int(row["arrival_ms"]) / 1000, prompt, max(1, round(int(row["output_length"]) / shrink))
    )


def _rows(name: str, num_requests: int) -> list[dict[str, str]]:
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))[:num_requests]


def _ids(runs: str) -> Iterator[int]:
    """'0 14-16' -> 0, 14, 15, 16."""
    for run in runs.split():
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)
