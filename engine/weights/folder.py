"""What a model folder in Hugging Face's layout says about itself, before any weight is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.weights.checkpoint import content_digest, read_checkpoint
from protocol.errors import StartupError


@dataclass(frozen=True)
class ModelFolder:
    """A checked model folder: config.json is readable and all its weight files are whole."""

    path: Path
    name: str
    """How users know the model: the folder's or GGUF file's name, or the hub id."""
    config: dict[str, Any]
    generation_config: dict[str, Any]
    """Empty when the folder has none."""
    revision: str
    """Digest of config and weights: equal content has equal revisions wherever it lies."""

    @property
    def tokenizer_path(self) -> Path:
        """The `tokenizer.json`. Raises `StartupError` when there is none."""
        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise StartupError(
                f"{self.path} has no tokenizer.json: download it too, or write one with "
                "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        return file

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer; empty when the folder names none."""
        found = self.generation_config.get("eos_token_id", self.config.get("eos_token_id"))
        if found is None:
            return ()
        return tuple(found) if isinstance(found, list) else (int(found),)


def open_folder(path: Path, *, name: str) -> ModelFolder:
    """Read and check the folder; raises `StartupError` that says what is wrong and what to do."""
    if not (path / "config.json").is_file():
        raise StartupError(
            f"{path} has no config.json: pass a folder in Hugging Face's layout "
            "(config.json, tokenizer.json, *.safetensors) or a .gguf file"
        )
    config = _read_json(path / "config.json")
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "unknown")
        raise StartupError(
            f"{path} holds weights quantised with {method!r}, which is not supported: "
            "use the unquantised model, or a GGUF of it"
        )
    return ModelFolder(
        path=path,
        name=name,
        config=config,
        generation_config=_read_json(path / "generation_config.json", optional=True),
        revision=content_digest(config, read_checkpoint(path)),
    )


def _read_json(file: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not file.is_file():
        return {}
    try:
        found = json.loads(file.read_bytes())
    except ValueError as error:
        raise StartupError(f"{file} is not valid JSON ({error}): download it again") from error
    if not isinstance(found, dict):
        raise StartupError(f"{file} holds a {type(found).__name__} where an object is due")
    return found
