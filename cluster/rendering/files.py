"""Which files does each target consist of, and how do they reach the disk?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.config import ClusterConfig
from cluster.rendering.serve_config import serve_config
from protocol.errors import StartupError

Files = dict[str, str]
"""Texts by file name, in the order in which a reader wants them."""


def render_files(target: str, config: ClusterConfig) -> Files:
    """The files of a target: ray-up, kuberay or serve. Raises `StartupError` for what cannot be."""
    return _TARGETS[target](config)


def as_stream(files: Files) -> str:
    """One text for a terminal or a pipe; several YAML files become documents of one stream."""
    return "---\n".join(files.values())


def write_files(files: Files, folder: Path) -> Iterator[Path]:
    """Write them into a folder, made if need be. Raises `StartupError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path = folder / name
            path.write_text(text, encoding="utf-8")
            yield path
    except OSError as error:
        raise StartupError(f"cannot write into {folder}: {error.strerror}") from error


def as_yaml(*documents: Mapping[str, Any]) -> str:
    """YAML documents as people write them: keys in the order given, long texts as blocks."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """No aliases, and texts of several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _serve(config: ClusterConfig) -> Files:
    return {"serve.yaml": as_yaml(serve_config(config))}


def _not_yet(config: ClusterConfig) -> Files:
    raise StartupError("this target cannot be rendered yet")


_TARGETS: Mapping[str, Callable[[ClusterConfig], Files]] = {
    "ray-up": _not_yet,
    "kuberay": _not_yet,
    "serve": _serve,
}
