"""Which prompts are compared: lengths around the block size, and long ones of several chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.generation import SamplingParams

PROMPT_LENGTHS = (1, 15, 16, 17, 31, 32, 33, 500, 2000)
"""In tokens; with blocks of 16 tokens these end before, at and after a block's end."""

SAMPLE_TEXT = """\
The lighthouse keeper wrote the weather into his book each evening: wind from the
north-west, a falling glass, two schooners at anchor behind the point. In the
morning he counted the sails again. When the fog came in he lit the lamp early and
wound the clockwork that turned the lens, forty turns of the crank for every hour of
the night. A recipe hung beside the stove: 200 g of flour, 3 eggs, a pinch of salt,
milk until it runs; fry on both sides. His sister sent letters from Zürich and São
Paulo, with stamps that he kept in a tin, and once a postcard in Japanese:
灯台の明かりは遠くまで届く。He learned to read the one word for light.

def fibonacci(n: int) -> int:
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a

Question: why does the moon pull the sea but not the tea in a cup? Answer: it pulls
both, but the cup is too small for the difference between its two sides to show. The
ocean is wide enough. Twice a day it leans towards the moon, and the boats in the
harbour rise and fall with it, whether anyone looks or not. 🌊🌙 Numbers he liked: 1,
1, 2, 3, 5, 8, 13, 21; and the 365.2422 days of a year.
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt and how it is continued."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams


def greedy_cases(text_token_ids: Sequence[int], num_cases: int, max_tokens: int, limit: int) -> list[Case]:
    """`num_cases` prompts cut out of a text, their lengths in turn those of `PROMPT_LENGTHS`.

    Args:
        text_token_ids: any text of the model's vocabulary; repeated as often as needed.
        limit: the model's context length in tokens; longer prompts are cut to fit.
    """
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    longest = limit - max_tokens
    return [
        Case(
            _window(text_token_ids, 97 * i, min(PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)], longest)), sampling
        )
        for i in range(num_cases)
    ]


def seeded_cases(cases: Sequence[Case]) -> list[Case]:
    """The same prompts, sampled: each with a seed, filters, penalties and biases of its own."""
    return [
        Case(
            case.prompt_token_ids,
            SamplingParams(
                max_tokens=case.sampling.max_tokens,
                temperature=(0.7, 1.0, 1.3)[i % 3],
                top_p=(1.0, 0.9)[i % 2],
                top_k=(0, 50)[i // 2 % 2],
                min_p=(0.0, 0.02)[i // 4 % 2],
                seed=0x5EED_0000_0000_0000 + i,
                presence_penalty=(0.0, 0.6)[i % 2],
                frequency_penalty=(0.0, 0.4, 0.0)[i % 3],
                repetition_penalty=(1.0, 1.2)[i // 3 % 2],
                logit_bias=()
                if i % 4
                else tuple((token, 1.5) for token in sorted(set(case.prompt_token_ids[:3]))),
                min_tokens=(0, 4)[i % 2],
            ),
        )
        for i, case in enumerate(cases)
    ]


def _window(ids: Sequence[int], start: int, length: int) -> tuple[int, ...]:
    return tuple(ids[(start + i) % len(ids)] for i in range(length))
