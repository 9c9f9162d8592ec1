"""What all sections of the configuration share: they are frozen, and refuse keys that nobody reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """Keys of the configuration file with their types and defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _empty_sections_are_defaults(cls, value: Any) -> Any:
        """`decode:` with all its keys commented out is null in YAML."""
        if not isinstance(value, Mapping):
            return value
        sections = {name for name, field in cls.model_fields.items() if is_section(field.annotation)}
        return {key: inner for key, inner in value.items() if inner is not None or key not in sections}


def is_section(annotation: object) -> bool:
    """Whether a key of this type holds keys."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
