"""Which keys does the configuration have, and what do they mean? Told as YAML and as a page of docs/.

The meanings are the docstrings below the fields of the sections, read from their source.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ByteSize

from cluster.config import ClusterConfig
from cluster.config_section import Section, is_section

COMMENT_WIDTH = 96
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))

PAGE_HEAD = """\
# Configuration

One YAML file, `splitserve serve --config FILE`; every key may be left out. `--set KEY=VALUE`, with the
key's full name such as `decode.num_workers`, wins over the file. `splitserve config` prints the defaults
as such a file. This page is written by `scripts/config_page`.
"""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a section."""

    name: str
    type: str
    default: object
    """As YAML has it."""
    meaning: str


def keys_of(section: BaseModel) -> list[Key]:
    """The keys of a section with its values, sub-sections left out."""
    kind = type(section)
    meanings = _meanings(kind)
    return [
        Key(name, _type_text(kind, name), _plain(getattr(section, name)), meanings.get(name, ""))
        for name, field in kind.model_fields.items()
        if not is_section(field.annotation)
    ]


def as_yaml(config: ClusterConfig) -> str:
    """A file that says what `config` says, with every key and its meaning."""
    return "\n".join(_yaml_lines(config, indent="")) + "\n"


def as_markdown() -> str:
    """The page of docs/. Sections of one kind with the same defaults are told once."""
    config = ClusterConfig()
    parts = [PAGE_HEAD, "## At the top\n", _table(keys_of(config))]
    told: list[tuple[str, BaseModel]] = []
    for name, section in _all_sections(config):
        twin = next((other for other, known in told if known == section), None)
        text = [f"As `{twin}`.\n"] if twin else [_table(keys)] if (keys := keys_of(section)) else []
        parts += [f"## `{name}`\n", (inspect.getdoc(type(section)) or "") + "\n", *text]
        told.append((name, section))
    return "\n".join(parts)


def _sections(outer: BaseModel) -> Iterator[tuple[str, BaseModel]]:
    for name in type(outer).model_fields:
        if isinstance(section := getattr(outer, name), BaseModel):
            yield name, section


def _all_sections(outer: BaseModel, prefix: str = "") -> Iterator[tuple[str, BaseModel]]:
    """Sections by their full names, each before those inside of it."""
    for name, section in _sections(outer):
        yield prefix + name, section
        yield from _all_sections(section, f"{prefix}{name}.")


def _table(keys: Sequence[Key]) -> str:
    rows = [
        f"| `{key.name}` | {key.type} | `{_yaml_value(key.default)}` | {' '.join(key.meaning.split())} |"
        for key in keys
    ]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _yaml_lines(section: BaseModel, indent: str) -> Iterator[str]:
    for key in keys_of(section):
        yield from _comment(f"{key.meaning} ({key.type.replace('`', '')})", indent)
        yield f"{indent}{key.name}: {_yaml_value(key.default)}"
    for name, inner in _sections(section):
        yield from ["", *_comment(inspect.getdoc(type(inner)) or "", indent), f"{indent}{name}:"]
        yield from _yaml_lines(inner, indent + "  ")


def _comment(text: str, indent: str) -> list[str]:
    return [f"{indent}# {line}" for line in textwrap.wrap(" ".join(text.split()), COMMENT_WIDTH)]


def _yaml_value(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")


def _plain(value: object) -> object:
    if isinstance(value, ByteSize):
        found = next((f"{value // size}{unit}" for unit, size in UNITS if value and not value % size), None)
        return found or int(value)
    return str(value) if isinstance(value, Path) else value


def _meanings(kind: type[BaseModel]) -> dict[str, str]:
    """The docstrings below the fields of a class and of those that it extends."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, Section) and base is not Section:
            found |= _docstrings(base)
    return found


def _docstrings(kind: type) -> dict[str, str]:
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)  # noqa: S101
    return {
        field.target.id: text.value.value
        for field, text in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _type_text(kind: type[BaseModel], name: str) -> str:
    """`integer ≥ 1 or null`, for example."""
    field = kind.model_fields[name]
    bounds = [
        f"{sign} {getattr(item, attribute)}"
        for item in field.metadata
        for attribute, sign in _BOUNDS
        if hasattr(item, attribute)
    ]
    first, *others = _branches(field.annotation)
    return " or ".join([" ".join([first, *bounds]), *others])


_BOUNDS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
_NAMES: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    Path: "path",
    ByteSize: "bytes",
    type(None): "null",
}


def _branches(annotation: Any) -> list[str]:
    """Names of the types of a union; the values of a `Literal`."""
    if annotation in _NAMES:
        return [_NAMES[annotation]]
    arguments: tuple[Any, ...] = getattr(annotation, "__args__", ())
    if getattr(annotation, "__origin__", None) is dict:
        return [f"mapping of names to {'texts' if arguments[1] is str else 'numbers'}"]
    if getattr(annotation, "__origin__", None) is list:
        return ["list of texts"]
    if all(isinstance(argument, str | int) and not isinstance(argument, type) for argument in arguments):
        return [f"`{argument}`" for argument in arguments]
    return [name for argument in arguments for name in _branches(argument)]
