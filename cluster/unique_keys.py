"""YAML in which no key stands twice: the parser itself would keep the last one, and say nothing."""

from __future__ import annotations

from typing import Any

import yaml


def load_yaml(text: str) -> Any:
    """The document. Raises `yaml.YAMLError`, for a key that stands twice in its section, too."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506  # it is a safe one


class _Loader(yaml.SafeLoader):
    """Looks at keys before `<<` brings in others, which may stand twice."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands here a second time", key.start_mark
                )
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        super().flatten_mapping(node)
