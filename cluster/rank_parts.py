"""From the configuration to one rank's part of an engine: model and KV cache. Imports torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cluster.config import ClusterConfig, PoolConfig
from cluster.model_length import max_model_len
from cluster.ranks.team import Room, Team
from cluster.threads import threads_per_rank
from engine.device import limit_threads, memory_bytes, select_device, select_dtype
from engine.host_kv_pool import HostKvPool
from engine.kv_cache import (
    KvCache,
    block_bytes_for,
    num_blocks_for,
    num_blocks_from_share,
    require_length,
    require_room,
)
from engine.model.config import ModelConfig
from engine.model.decoder import DecoderModel
from engine.ops import Ops, choose_ops
from engine.weights import ModelFolder, Progress, load_packed
from kv_transfer import MemoryKind, PoolMemory
from protocol.errors import StartupError
from protocol.handoff import Fingerprint
from protocol.rank_layout import RankLayout

logger = logging.getLogger(__name__)

Sizes = tuple[ModelConfig, int, torch.dtype]
"""Of a block: the model whose KV it has, its tokens, and the type of its numbers."""


@dataclass(frozen=True, slots=True)
class RankParts:
    """What every rank of a worker has; the only one has all of the model."""

    model: DecoderModel
    kv_cache: KvCache
    host_pool: HostKvPool | None
    fingerprint: Fingerprint
    """The worker's, the same of all its ranks."""

    @property
    def pool_memory(self) -> PoolMemory:
        device = self.kv_cache.blocks.device
        return PoolMemory(
            address=self.kv_cache.data_ptr,
            num_blocks=self.kv_cache.num_blocks,
            block_bytes=self.kv_cache.block_bytes,
            kind=MemoryKind.HOST if device.type == "cpu" else MemoryKind.DEVICE,
            device_id=device.index or 0,
            owner=self.kv_cache,
        )


def load_rank(
    config: ClusterConfig,
    pool: PoolConfig,
    folder: ModelFolder,
    team: Team,
    *,
    progress: Progress | None = None,
    end_phase: Callable[[str], None] = lambda phase: None,
) -> RankParts:
    """Load this rank's part of the model and lay out its KV cache: takes as long as the slowest rank does.

    `end_phase` hears when kernels and weights are loaded. Raises `StartupError`.
    """
    limit_threads(threads_per_rank(config, pool))
    whole = ModelConfig.from_hf(folder.config)
    length, block_size = max_model_len(config, whole), config.block_size_of(pool)
    shard = team.shard_of(whole)
    device = select_device("auto" if pool.num_gpus else "cpu")
    dtype = select_dtype(config.dtype_of(pool), device)
    ops = _ops(config, pool, whole, device, dtype)
    weights = load_packed(
        folder,
        whole,
        ops,
        device=device,
        dtype=dtype,
        cache_dir=config.cache_dir.expanduser() / "packed",
        shard=shard,
        progress=progress,
    )
    end_phase("weights")
    mine = shard.local if shard is not None else whole
    room = team.agree(_room(pool, (mine, block_size, dtype), device))
    require_length(room.num_blocks, block_size, length)
    cache, host_pool = _lay_out_kv(room, (mine, block_size, dtype), device)
    partition = team.join(shard, device)
    return RankParts(
        DecoderModel(
            mine, weights, ops, device=device, dtype=dtype, max_model_len=length, partition=partition
        ),
        cache,
        host_pool,
        _fingerprint(config, folder, (whole, block_size, dtype), team.layout),
    )


def _ops(
    config: ClusterConfig, pool: PoolConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Ops:
    return choose_ops(
        device,
        dtype,
        head_dim=model.head_dim,
        num_threads=threads_per_rank(config, pool),
        cache_dir=config.cache_dir.expanduser() / "cpu-ops",
        attention=config.attention,
    )


def _room(pool: PoolConfig, sizes: Sizes, device: torch.device) -> Room:
    """Blocks of one rank, as if it were alone."""
    free_bytes, _ = memory_bytes(device)
    if pool.num_blocks is not None:
        num_blocks = pool.num_blocks
    elif pool.kv_cache_share is not None:
        num_blocks = num_blocks_from_share(pool.kv_cache_share, free_bytes, *sizes)
    else:
        num_blocks = num_blocks_for(pool.kv_cache_memory, *sizes)
    require_room(num_blocks, block_bytes_for(*sizes), free_bytes)
    return Room(num_blocks, _num_host_blocks(pool, block_bytes_for(*sizes)))


def _lay_out_kv(room: Room, sizes: Sizes, device: torch.device) -> tuple[KvCache, HostKvPool | None]:
    model, block_size, dtype = sizes
    logger.info("%d KV blocks of %d tokens", room.num_blocks - 1, block_size)
    cache = KvCache(model, num_blocks=room.num_blocks, block_size=block_size, dtype=dtype, device=device)
    return cache, HostKvPool(cache, room.num_host_blocks) if room.num_host_blocks else None


def _num_host_blocks(pool: PoolConfig, block_bytes: int) -> int:
    if pool.preemption != "swap":
        return 0
    num_blocks = pool.swap_memory // block_bytes
    if num_blocks < 1:
        raise StartupError(
            f"preemption is swap, but swap_memory holds no block of {block_bytes:,} bytes: raise it"
        )
    return num_blocks


def _fingerprint(
    config: ClusterConfig, folder: ModelFolder, sizes: Sizes, layout: RankLayout
) -> Fingerprint:
    model, block_size, dtype = sizes
    name = str(dtype).removeprefix("torch.")
    return Fingerprint(
        model=config.model_name,
        revision=folder.revision,
        dtype=name,
        kv_dtype=name,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=block_size,
        tensor_parallel_size=layout.tensor_parallel_size,
        pipeline_parallel_size=layout.pipeline_parallel_size,
    )
