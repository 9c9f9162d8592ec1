"""Which files does each target consist of, and how do they reach the disk?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.rendering.kuberay import kuberay_documents
from cluster.rendering.ray_up import ray_up_files
from cluster.rendering.serve_config import serve_config
from cluster.rendering.yaml_text import as_yaml
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


def _serve(config: ClusterConfig) -> Files:
    return {"serve.yaml": as_yaml(serve_config(config))}


def _kuberay(config: ClusterConfig) -> Files:
    return {"kuberay.yaml": as_yaml(*kuberay_documents(config))}


_TARGETS: Mapping[str, Callable[[ClusterConfig], Files]] = {
    "ray-up": ray_up_files,
    "kuberay": _kuberay,
    "serve": _serve,
}
