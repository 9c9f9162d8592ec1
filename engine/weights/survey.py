"""What would a start find under a model's name? Looked at without downloading, converting or loading it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from engine.weights.checkpoint import read_checkpoint
from engine.weights.folder import ModelFolder, open_folder
from engine.weights.gguf_config import hf_config
from engine.weights.gguf_convert import conversion_target
from engine.weights.gguf_file import read_gguf
from engine.weights.gguf_tensors import written_bytes
from engine.weights.resolve import find_file_or_folder


class ModelState(StrEnum):
    """What a start has yet to do."""

    READY = "ready"
    TO_CONVERT = "to convert"
    TO_DOWNLOAD = "to download"


@dataclass(frozen=True)
class ModelSurvey:
    """A model whose files are whole, or one that is not here yet."""

    path: str
    """The folder, the file that is to be converted, or the hub id."""
    state: ModelState
    revision: str = ""
    """As `ModelFolder.revision`; empty unless it is ready."""
    config: dict[str, Any] | None = None
    """The content of config.json; None until it is downloaded."""
    num_parameters: int = 0


def survey_model(spec: str, *, cache_dir: Path) -> ModelSurvey:
    """Arguments and errors are those of `resolve_model`."""
    path = find_file_or_folder(spec)
    if path is None:
        snapshot = _downloaded(spec)
        if snapshot is None:
            return ModelSurvey(spec, ModelState.TO_DOWNLOAD)
        return _survey_folder(open_folder(snapshot, name=spec))
    if path.is_dir():
        return _survey_folder(open_folder(path, name=path.name))
    target = conversion_target(path, cache_dir)
    if target.is_dir():
        return _survey_folder(open_folder(target, name=path.stem))
    gguf = read_gguf(path)
    written_bytes(gguf)  # raises for tensors that cannot be converted
    num_parameters = sum(math.prod(tensor.shape) for tensor in gguf.tensors.values())
    return ModelSurvey(str(path), ModelState.TO_CONVERT, "", hf_config(gguf), num_parameters)


def _survey_folder(folder: ModelFolder) -> ModelSurvey:
    _ = folder.tokenizer_path
    num_parameters = sum(math.prod(tensor.shape) for tensor in read_checkpoint(folder.path))
    return ModelSurvey(str(folder.path), ModelState.READY, folder.revision, folder.config, num_parameters)


def _downloaded(hub_id: str) -> Path | None:
    """The snapshot in the hub's cache; the network is not asked."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
