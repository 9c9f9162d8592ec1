"""What the soak calls the same answer, and what a difference."""

from __future__ import annotations

import copy
from typing import Any

from soak_answers import difference, essence, joined

USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def choice(index: int, text: str, ids: list[int], finish_reason: str | None) -> dict[str, Any]:
    logprobs = {"tokens": [str(i) for i in ids], "token_logprobs": [-float(i) for i in ids]}
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "token_ids": ids,
    }


def answer() -> dict[str, Any]:
    choices = [choice(1, "cd", [3, 4], "stop"), choice(0, "ab", [1, 2], "length")]
    return {"id": "x", "created": 1, "choices": choices, "usage": USAGE | {"prompt_tokens_details": {}}}


def test_a_stream_joined_is_the_whole_answer() -> None:
    parts = [
        choice(1, "c", [3], None),
        choice(0, "a", [1], None),
        choice(0, "b", [2], "length"),
        choice(1, "d", [4], "stop"),
    ]
    chunks = [{"choices": [part], "usage": None} for part in parts]
    whole = joined([*chunks, {"choices": [], "usage": USAGE}])
    assert difference(essence(answer()), essence(whole)) is None


def test_a_lost_a_repeated_and_a_wrong_token_are_differences() -> None:
    golden = essence(answer())
    for ids in ([1], [1, 2, 2], [1, 9]):
        found = copy.deepcopy(golden)
        found["choices"][0]["token_ids"] = ids
        assert "choice 0: token_ids has" in str(difference(golden, found))


def test_a_slightly_different_logprob_and_usage_are_differences() -> None:
    golden = essence(answer())
    found = copy.deepcopy(golden)
    found["choices"][1]["logprobs"]["token_logprobs"][1] += 1e-12
    assert "choice 1: logprobs.token_logprobs has 2 entries" in str(difference(golden, found))
    found = copy.deepcopy(golden)
    found["usage"]["completion_tokens"] = 5
    assert "'completion_tokens': 5" in str(difference(golden, found))
