"""YAML as people write it: keys in the order given, long texts as blocks, no references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml


def as_yaml(*documents: Mapping[str, Any]) -> str:
    """YAML documents of one stream."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """No aliases, and texts of several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
