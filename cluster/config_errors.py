"""What is wrong with a configuration, told in its own words: paths of keys, no names of our classes."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

MAX_SHOWN_CHARACTERS = 60


def explain(error: ValidationError, kind: type[BaseModel], where: Mapping[str, str], elsewhere: str) -> str:
    """One line per bad key.

    Args:
        where: from the dotted path of a key to the place where it was set; everything in it, too.
        elsewhere: where all other keys were set.
    """
    problems: dict[str, list[dict[str, Any]]] = {}
    for item in error.errors():
        problems.setdefault(_key_path(item["loc"], kind), []).append(dict(item))
    lines = []
    for path, items in problems.items():
        if path:
            lines.append(f"  {path}: {_problem(path, items, kind)} ({_place(path, where, elsewhere)})")
        else:
            lines += [f"  {item['msg'].removeprefix('Value error, ')}" for item in items]
    return "\n".join(lines)


def key_paths(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted paths of all keys, without those of the sections themselves."""
    for name, field in kind.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from key_paths(inner, f"{prefix}{name}.")
        else:
            yield prefix + name


def _key_path(steps: Sequence[int | str], kind: type[BaseModel]) -> str:
    """The part of an error's location that the document's writer knows: keys, no branches of unions."""
    path: list[str] = []
    section: object = kind
    for step in steps:
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            break
        path.append(str(step))
        field = section.model_fields.get(str(step))
        section = field.annotation if field else None
    return ".".join(path)


def _place(path: str, where: Mapping[str, str], elsewhere: str) -> str:
    parts = path.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((where[prefix] for prefix in prefixes if prefix in where), elsewhere)


def _problem(path: str, items: Sequence[Mapping[str, Any]], kind: type[BaseModel]) -> str:
    """What is wrong with one key; several items are the branches of a union."""
    given = _shown(items[0]["input"])
    match items[0]["type"]:
        case "extra_forbidden":
            return "unknown key" + _suggestion(path, kind)
        case "model_type" | "model_attributes_type":
            return f"must be a section of keys, not {given}"
        case "byte_size" | "byte_size_unit":
            return f"must be a number of bytes such as 512MiB or 4GiB, not {given}"
    first, *others = (_requirement(item) for item in items)
    if items[0]["type"] == "value_error" and not isinstance(items[0]["input"], str):
        return first  # it says which part is wrong; the whole may be long, or nobody's business
    return " or ".join([first, *(text.removeprefix("must be ") for text in others)]) + f", not {given}"


def _requirement(item: Mapping[str, Any]) -> str:
    message = str(item["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    return message.partition(", unable to parse")[0].replace("a valid ", "a ").replace("a int", "an int")


def _suggestion(path: str, kind: type[BaseModel]) -> str:
    known = list(key_paths(kind))
    name = path.rpartition(".")[2]
    found = [key for key in known if key.rpartition(".")[2] == name] or difflib.get_close_matches(
        path, known, n=1
    )
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."
