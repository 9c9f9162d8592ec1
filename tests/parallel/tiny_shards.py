"""Tiny random models on disk, and the engine's parts of one rank of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiny_models import BLOCK_SIZE, CPU, make_reference

from engine.forward import ForwardPass
from engine.host_kv_pool import HostKvPool
from engine.kv_cache import KvCache
from engine.model import DecoderModel, ModelConfig
from engine.ops import Ops, TorchOps
from engine.parallel import RankGroups, RankPartition, shard_of
from engine.runner import ModelRunner
from engine.weights import ModelFolder, load_packed
from engine.weights.folder import open_folder

NUM_BLOCKS = 200


def write_model(kind: str, path: Path, **changes: Any) -> ModelFolder:
    """A random model of a kind of `tiny_models` as a Hugging Face folder."""
    make_reference(kind, **changes).save_pretrained(path)
    return open_folder(path, name=kind)


@dataclass(frozen=True)
class Rank:
    """What one rank has; the only one has the whole model."""

    model: DecoderModel
    kv_cache: KvCache
    host_pool: HostKvPool | None = None

    @property
    def forward(self) -> ForwardPass:
        return ForwardPass(self.model, self.kv_cache, self.host_pool)

    @property
    def runner(self) -> ModelRunner:
        return ModelRunner(self.model, self.kv_cache, (2,), self.host_pool)


def torch_ops() -> Ops:
    return TorchOps(CPU, torch.float32)


def load_rank(
    folder: ModelFolder,
    groups: RankGroups | None,
    cache_dir: Path,
    *,
    make_ops: Callable[[], Ops] = torch_ops,
    dtype: torch.dtype = torch.float32,
    num_blocks: int = NUM_BLOCKS,
    num_host_blocks: int = 0,
) -> Rank:
    """The part that belongs to a rank with these groups; without groups, the whole model."""
    config = ModelConfig.from_hf(folder.config)
    ops = make_ops()
    shard = shard_of(config, groups.rank, groups.layout) if groups else None
    weights = load_packed(folder, config, ops, device=CPU, dtype=dtype, cache_dir=cache_dir, shard=shard)
    model = DecoderModel(
        shard.local if shard else config,
        weights,
        ops,
        device=CPU,
        dtype=dtype,
        partition=RankPartition(shard, groups) if shard and groups else None,
    )
    kv_cache = KvCache(model.config, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=dtype, device=CPU)
    kv_cache.blocks.fill_(float("nan"))
    host_pool = HostKvPool(kv_cache, num_host_blocks) if num_host_blocks else None
    return Rank(model, kv_cache, host_pool)
