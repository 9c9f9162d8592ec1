"""Reading values out of a config.json, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from protocol.errors import StartupError

T = TypeVar("T")
D = TypeVar("D")
Json = Mapping[str, object]


def need(config: Json, key: str, kind: type[T]) -> T:
    if config.get(key) is None:
        raise StartupError(f"the model's config.json lacks {key!r}")
    return convert(key, config[key], kind)


def get(config: Json, key: str, kind: type[T], default: D) -> T | D:
    """The value of `key`; the default when it is absent or null, as transformers has it."""
    value = config.get(key)
    return default if value is None else convert(key, value, kind)


def convert(key: str, value: object, kind: type[T]) -> T:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise StartupError(f"the model's config.json has {key!r}: {value!r}, which is no {kind.__name__}")
    return value
