"""Which request fields are understood, harmless, or refused, and how a bad body becomes a 400.

A field that changes the answer is never ignored: it works, has its neutral value, or is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from protocol.errors import InvalidRequest

HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields of OpenAI's API that do not change what is generated."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Known fields that are not supported yet, with the values (besides null) that ask for nothing."""

_PLURALS = frozenset({"documents", "functions", "tools", "web_search_options"})

MAX_ECHOED_CHARACTERS = 64

ModelT = TypeVar("ModelT", bound="Fields")


class Fields(BaseModel):
    """Base of all request models: no conversions between types, no NaN, nothing ignored unseen."""

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, frozen=True, protected_namespaces=()
    )


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object in a request's body. Raises `InvalidRequest`."""
    try:
        content = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        if b"\\ud" in body or b"\\uD" in body:
            json.dumps(content, ensure_ascii=False).encode("utf-8")  # half a surrogate pair is no text
    except UnicodeDecodeError as error:
        raise InvalidRequest("the body is not valid UTF-8", code="invalid_utf8") from error
    except UnicodeEncodeError as error:
        raise InvalidRequest("a string in the body is not valid Unicode", code="invalid_utf8") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from error
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(content, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return content


def shortened(text: str) -> str:
    """What an error says of a text that a client sent: its beginning."""
    return text if len(text) <= MAX_ECHOED_CHARACTERS else f"{text[:MAX_ECHOED_CHARACTERS]}..."


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def validate(kind: type[ModelT], content: dict[str, Any]) -> ModelT:
    """`content` as a request of `kind`. Raises `InvalidRequest` that names the first bad field."""
    try:
        fields = kind.model_validate(content)
    except ValidationError as error:
        raise _first_problem(error) from error
    refuse_extras(fields.model_extra or {})
    return fields


def _first_problem(error: ValidationError) -> InvalidRequest:
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = ""
    for step in problem["loc"]:
        name = f"[{step}]" if isinstance(step, int) else shortened(step)
        param += f".{name}" if param and isinstance(step, str) else name
    code = "missing_required_parameter" if problem["type"] == "missing" else "invalid_value"
    text = problem["msg"].removeprefix("Value error, ")
    return InvalidRequest(f"{param}: {text}" if param else text, param=param or None, code=code)


def refuse_extras(extras: Mapping[str, Any], where: str = "") -> None:
    """Raise `InvalidRequest` for the first field that would change the answer."""
    for name, value in extras.items():
        if value is None or name in HARMLESS:
            continue
        param = where + shortened(name)
        if name not in NEUTRAL:
            raise InvalidRequest(
                f"unrecognized request argument: {param}", param=param, code="unknown_parameter"
            )
        if not any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL[name]):
            raise InvalidRequest(_unsupported(name, param), param=param, code="unsupported_parameter")


def _unsupported(name: str, param: str) -> str:
    """Of a field with neutral values that say something, these are named."""
    values = NEUTRAL[name]
    telling = [json.dumps(value) for at, value in enumerate(values) if value and value not in values[:at]]
    if telling:
        return f"{param}: only {' or '.join(telling)} is supported"
    return f"{param} {'are' if name in _PLURALS else 'is'} not supported"
