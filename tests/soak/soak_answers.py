"""What came back, and is it what should have come? Whole and streamed answers are brought to one form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")


def essence(body: Json) -> Json:
    """What must be equal of a whole answer: all but its id, its time and what was cached."""
    choices = sorted(body["choices"], key=lambda choice: int(choice["index"]))
    essence: Json = json.loads(
        json.dumps({"choices": choices, "usage": {name: body["usage"][name] for name in _COUNTS}})
    )
    return essence


def joined(chunks: Sequence[Json]) -> Json:
    """The whole answer that a stream's chunks make."""
    choices: dict[int, Json] = {}
    usage: Json = {}
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for part in chunk["choices"]:
            _append(choices, part)
    return {"choices": list(choices.values()), "usage": usage or dict.fromkeys(_COUNTS)}


def _append(choices: dict[int, Json], part: Json) -> None:
    choice = choices.get(part["index"])
    if choice is None:
        choices[part["index"]] = part
        return
    choice["text"] += part["text"]
    choice["token_ids"] = choice["token_ids"] + part["token_ids"]
    choice["finish_reason"] = part["finish_reason"]
    if part["logprobs"] is not None:
        for name, values in part["logprobs"].items():
            choice["logprobs"][name] = choice["logprobs"][name] + values


def difference(golden: Json, found: Json) -> str | None:
    """Where two answers differ first, with both values; None when they are equal."""
    if golden == found:
        return None
    if len(golden["choices"]) != len(found["choices"]):
        return f"{len(found['choices'])} choices instead of {len(golden['choices'])}"
    for right, wrong in zip(golden["choices"], found["choices"], strict=True):
        for name in ("token_ids", "finish_reason", "text", "logprobs", "prompt_logprobs"):
            if right.get(name) != wrong.get(name):
                return f"choice {right['index']}: {_first(name, right.get(name), wrong.get(name))}"
    return f"{found['usage']} instead of {golden['usage']}"


def _first(name: str, right: Any, wrong: Any) -> str:
    if isinstance(right, dict) and isinstance(wrong, dict):
        field = next(f for f in right if right[f] != wrong.get(f))
        return _first(f"{name}.{field}", right[field], wrong.get(field))
    if not isinstance(right, list) or not isinstance(wrong, list):
        return f"{name} is {wrong!r} instead of {right!r}"
    pairs = enumerate(zip(right, wrong, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(right), len(wrong)))
    return (
        f"{name} has {len(wrong)} entries instead of {len(right)} and differs first at {at}: "
        f"{wrong[at : at + 4]} instead of {right[at : at + 4]}"
    )
