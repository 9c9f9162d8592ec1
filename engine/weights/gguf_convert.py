"""A GGUF file as a model folder in Hugging Face's layout, made once and kept in a cache."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.weights.cache_files import locked, sync
from engine.weights.gguf_config import generation_config, hf_config
from engine.weights.gguf_file import GgufFile, read_gguf
from engine.weights.gguf_tensors import write_safetensors, written_bytes
from engine.weights.gguf_tokenizer import build_tokenizer, tokenizer_config
from engine.weights.progress import Progress, tracked
from protocol.errors import StartupError

CONVERTER_VERSION = 1
"""Raised with every change of what a conversion writes, so that older copies are not used."""
_ENDS_BYTES = 1 << 20


def converted_folder(gguf: Path, cache_dir: Path, progress: Progress | None = None) -> Path:
    """The folder that `gguf` was converted to; converts it when that has not been done yet.

    A folder with its final name is complete: it is written under another name, synced and renamed,
    under a lock that dies with its process. So of many workers that start at once one converts, and
    what a killed one leaves is swept away by the next.
    Raises `StartupError` for a bad file, a full disk or a cache that cannot be written.
    """
    target = conversion_target(gguf, cache_dir)
    if target.is_dir():
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with locked(cache_dir / f".{target.name}.lock"):
            if not target.is_dir():
                _publish(target, lambda folder: _convert(gguf, folder, progress))
    except OSError as error:
        raise StartupError(
            f"{gguf} cannot be converted into {cache_dir} ({error}): choose another cache folder"
        ) from error
    return target


def conversion_target(gguf: Path, cache_dir: Path) -> Path:
    """Where `converted_folder` puts it; a folder of that name is complete."""
    return cache_dir / f"{gguf.stem}-{_file_digest(gguf)}"


def _file_digest(file: Path) -> str:
    """Identity of the file for the cache; reads a little of it, not ten gigabytes."""
    stat = file.stat()
    digest = hashlib.sha256(f"{CONVERTER_VERSION}|{stat.st_size}|{stat.st_mtime_ns}|".encode())
    with file.open("rb") as stream:
        digest.update(stream.read(_ENDS_BYTES))
        stream.seek(max(0, stat.st_size - _ENDS_BYTES))
        digest.update(stream.read(_ENDS_BYTES))
    return digest.hexdigest()[:16]


def _publish(target: Path, build: Callable[[Path], None]) -> None:
    """Let `build` fill a folder and give it its name when all is on disk. Under the target's lock."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        build(partial)
        for file in (*partial.iterdir(), partial):
            sync(file)
        partial.rename(target)
        sync(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _convert(path: Path, folder: Path, progress: Progress | None) -> None:
    gguf = read_gguf(path)
    _write_json(folder / "config.json", hf_config(gguf))
    _write_json(folder / "generation_config.json", generation_config(gguf))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(gguf))
    build_tokenizer(gguf).save(str(folder / "tokenizer.json"))
    _check_space(gguf, folder)
    with tracked(progress, f"Converting {path.name}", written_bytes(gguf)) as advance:
        write_safetensors(gguf, folder / "model.safetensors", advance)


def _check_space(gguf: GgufFile, folder: Path) -> None:
    needed, free = written_bytes(gguf), shutil.disk_usage(folder).free
    if needed > free:
        raise StartupError(
            f"{gguf.path} needs {needed / 1e9:.1f} GB when converted and {folder.parent} has "
            f"{free / 1e9:.1f} GB left: choose another cache folder"
        )


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
