"""A model's weights as its ops want them: packed once per host where that can be kept, else per process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engine.weights.cache_files import locked, sync
from engine.weights.folder import ModelFolder
from engine.weights.load import load_weights
from engine.weights.packed_file import Key, map_parts, write_parts
from engine.weights.progress import Progress
from protocol.errors import StartupError

if TYPE_CHECKING:
    import torch

    from engine.model import ModelConfig
    from engine.model.weights import ModelWeights, Part
    from engine.ops import Ops
    from engine.parallel import Shard

log = logging.getLogger(__name__)

Make = Callable[[], Iterable[tuple[str, "Part"]]]


def load_packed(
    folder: ModelFolder,
    config: ModelConfig,
    ops: Ops,
    *,
    device: torch.device,
    dtype: torch.dtype,
    cache_dir: Path,
    shard: Shard | None = None,
    progress: Progress | None = None,
) -> ModelWeights:
    """The model's weights, packed by `ops`; with `shard`, made of `config`, that rank's part of them.

    Where `ops` pack into plain memory, the first worker of a host writes a file in `cache_dir`, and all of
    them map it: they share its memory, and later starts read no checkpoint. Raises `StartupError`.
    """
    from engine.model.weights import assemble, packed_parts

    part = shard.local if shard else config

    def make() -> Iterable[tuple[str, Part]]:
        weights = load_weights(folder, dtype, shard=shard, progress=progress)
        return packed_parts(part, weights, ops, device, dtype)

    if ops.packing is None:
        return assemble(part, dict(make()))
    number_type = str(dtype).removeprefix("torch.")
    key = {"revision": folder.revision, "dtype": number_type, "packing": ops.packing}
    if shard:
        key["shard"] = shard.label
    return assemble(part, shared_parts(cache_dir, key, make))


def shared_parts(cache_dir: Path, key: Key, make: Make) -> Mapping[str, Part]:
    """The parts under `key`, mapped from a file that is written if it is not there or is damaged.

    A file with its final name is whole: it is written under another name, synced and renamed, under a lock
    that dies with its process. Where nothing can be written the parts are this process's own.
    """
    file = cache_dir / f"{'-'.join(key.values())}.weights"
    if (found := _mapped(file, key)) is not None:
        return found
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with locked(cache_dir / f".{file.name}.lock"):
            if (found := _mapped(file, key)) is None:
                _publish(file, key, make)
                found = map_parts(file, key)
            return found
    except OSError as error:
        log.warning("the packed weights are not shared: %s cannot be written (%s)", cache_dir, error)
        return dict(make())


def _mapped(file: Path, key: Key) -> Mapping[str, Part] | None:
    if not file.exists():
        return None
    try:
        return map_parts(file, key)
    except StartupError as error:
        log.warning("packing the weights again: %s", error.message)
        return None


def _publish(file: Path, key: Key, make: Make) -> None:
    partial = file.with_name(f".{file.name}.partial")
    try:
        write_parts(partial, key, make())
        sync(partial)
        partial.replace(file)
        sync(file.parent)
    finally:
        partial.unlink(missing_ok=True)
