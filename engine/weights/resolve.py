"""From what a user calls a model (a folder, a .gguf file, a hub id) to a checked model folder."""

from __future__ import annotations

import re
from pathlib import Path

from engine.weights.folder import ModelFolder, open_folder
from engine.weights.gguf_convert import converted_folder
from engine.weights.progress import Progress
from protocol.errors import StartupError

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def resolve_model(spec: str, *, cache_dir: Path, progress: Progress | None = None) -> ModelFolder:
    """Find the model, downloading or converting it when that has not been done yet.

    `cache_dir` keeps converted GGUF files. Raises `StartupError` that says what is wrong with `spec`
    and what to do. Safe to call from several processes at once.
    """
    path = find_file_or_folder(spec)
    if path is None:
        return open_folder(_download(spec), name=spec)
    if path.is_dir():
        return open_folder(path, name=path.name)
    return open_folder(converted_folder(path, cache_dir, progress), name=path.stem)


def find_file_or_folder(spec: str) -> Path | None:
    """What is here under that name; None when it looks like a hub id. Raises `StartupError`."""
    path = Path(spec).expanduser()
    if path.is_file() and path.suffix == ".safetensors":
        raise StartupError(f"{path} is only a model's weights: pass its folder, {path.parent}")
    if path.exists():
        return path.resolve()
    if _HUB_ID.fullmatch(spec) and path.suffix != ".gguf":
        return None
    raise StartupError(
        f"there is no model at {spec!r}: pass a model folder, a .gguf file or a hub id like org/name"
    )


def _download(hub_id: str) -> Path:
    """The newest snapshot; without a network the one downloaded last."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, RevisionResolutionError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"]))
    except (
        OSError,
        httpx.HTTPError,
        EntryNotFoundError,
        HFValidationError,
        RevisionResolutionError,
    ) as error:
        raise StartupError(
            f"{hub_id!r} is no local path, and could not be downloaded ({type(error).__name__}): "
            "check the name and the network, or pass the path of a local folder or .gguf file"
        ) from error
