"""Which requests does a soak send? All kinds mixed, the same ones for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

MODEL = "tiny"
MAX_PROMPT_TOKENS = 600
MAX_OUTPUT_TOKENS = 64
TOKENS = range(3, 259)
"""One for every byte; see `tiny_clusters`."""
NUM_SHARED_PREFIXES = 4
STOP_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,>"


@dataclass(frozen=True, slots=True)
class Case:
    """One request for /v1/completions."""

    number: int
    body: dict[str, Any]

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.get("stream"))


def make_cases(count: int, seed: int) -> list[Case]:
    rng = random.Random(f"cases {seed}")
    prefixes = [rng.choices(TOKENS, k=rng.randint(40, 300)) for _ in range(NUM_SHARED_PREFIXES)]
    return [Case(number, _body(rng, prefixes)) for number in range(count)]


def _body(rng: random.Random, prefixes: list[list[int]]) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": _prompt(rng, prefixes),
        "max_tokens": rng.randint(1, MAX_OUTPUT_TOKENS),
        "return_token_ids": True,
        **_sampling(rng),
        **_extras(rng),
    }
    if rng.random() < 0.7:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    elif rng.random() < 0.2:
        body["prompt_logprobs"] = 1
    return body


def _prompt(rng: random.Random, prefixes: list[list[int]]) -> list[int]:
    """Short and long ones; every third begins like others."""
    length = round(MAX_PROMPT_TOKENS ** rng.uniform(0, 1)) if rng.random() < 0.5 else rng.randint(1, 600)
    start = rng.choice(prefixes)[: length // 2] if rng.random() < 0.33 else []
    return start + rng.choices(TOKENS, k=length - len(start))


def _sampling(rng: random.Random) -> dict[str, Any]:
    """Greedy, or drawn from a seed; sometimes two choices."""
    if rng.random() < 0.5:
        return {"temperature": 0.0}
    return {
        "temperature": rng.choice((0.7, 1.0, 1.3)),
        "seed": rng.getrandbits(63),
        "top_p": rng.choice((1.0, 0.9)),
        "top_k": rng.choice((-1, 40)),
        "min_p": rng.choice((0.0, 0.01)),
        "n": 2 if rng.random() < 0.4 else 1,
    }


def _extras(rng: random.Random) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if rng.random() < 0.5:
        extras["logprobs"] = rng.randint(0, 5)
    if rng.random() < 0.3:
        extras["stop"] = ["".join(rng.choices(STOP_CHARACTERS, k=rng.randint(1, 2))) for _ in range(3)]
    if rng.random() < 0.3:
        extras["presence_penalty"] = rng.choice((0.5, -0.5))
        extras["frequency_penalty"] = rng.choice((0.0, 0.4))
    if rng.random() < 0.2:
        extras["repetition_penalty"] = 1.2
    if rng.random() < 0.3:
        extras["ignore_eos"] = True
    return extras
