"""From the configuration to one loaded engine: model, KV cache, scheduler. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cluster.config import ClusterConfig, PoolConfig
from cluster.model_length import max_model_len
from cluster.threads import threads_per_engine
from engine import Command, EngineCore, EngineThread, Event, SchedulerConfig
from engine.device import limit_threads, memory_bytes, select_device, select_dtype
from engine.kv_cache import KvCache, block_bytes_for, num_blocks_for
from engine.model.config import ModelConfig
from engine.model.decoder import DecoderModel
from engine.ops import choose_ops
from engine.runner import ModelRunner
from engine.weights import ModelFolder, Progress, load_weights
from kv_transfer import PoolMemory
from protocol.errors import StartupError
from protocol.handoff import Fingerprint
from rpc import Engine

OnEvents = Callable[[Sequence[Event]], None]


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A loaded engine, not yet running."""

    runner: ModelRunner
    kv_cache: KvCache
    scheduler: SchedulerConfig
    eos_token_ids: frozenset[int]
    fingerprint: Fingerprint

    def make_core(self) -> EngineCore:
        return EngineCore(self.scheduler, self.runner, self.eos_token_ids, time.monotonic)

    def make_thread(self, name: str, on_events: OnEvents) -> Engine[Command]:
        return EngineThread(self.make_core(), on_events, name)

    @property
    def pool_memory(self) -> PoolMemory:
        return PoolMemory(
            address=self.kv_cache.data_ptr,
            num_blocks=self.kv_cache.num_blocks,
            block_bytes=self.kv_cache.block_bytes,
            owner=self.kv_cache,
        )


def build_engine(
    config: ClusterConfig, pool: PoolConfig, folder: ModelFolder, progress: Progress | None = None
) -> EngineParts:
    """Load the model and lay out its KV cache. Takes seconds. Raises `StartupError`."""
    num_threads = threads_per_engine(config, pool)
    limit_threads(num_threads)
    model_config = ModelConfig.from_hf(folder.config)
    length = max_model_len(config, model_config)
    device = select_device("auto" if pool.num_gpus else "cpu")
    dtype = select_dtype(config.dtype, device)
    num_blocks = _num_blocks(config, pool, model_config, dtype, device)
    scheduler = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=length,
        max_num_seqs=pool.max_num_seqs,
        max_num_batched_tokens=pool.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    weights = load_weights(folder, dtype, progress=progress)
    ops = choose_ops(
        device,
        dtype,
        head_dim=model_config.head_dim,
        num_threads=num_threads,
        cache_dir=config.cache_dir.expanduser() / "cpu-ops",
    )
    model = DecoderModel(model_config, weights, ops, device=device, dtype=dtype, max_model_len=length)
    kv_cache = KvCache(
        model_config, num_blocks=num_blocks, block_size=config.block_size, dtype=dtype, device=device
    )
    runner = ModelRunner(model, kv_cache, tuple(folder.eos_token_ids))
    runner.warm_up()
    return EngineParts(
        runner=runner,
        kv_cache=kv_cache,
        scheduler=scheduler,
        eos_token_ids=frozenset(folder.eos_token_ids),
        fingerprint=_fingerprint(config, folder, model_config, str(dtype).removeprefix("torch.")),
    )


def _num_blocks(
    config: ClusterConfig, pool: PoolConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> int:
    block_bytes = block_bytes_for(model, config.block_size, dtype)
    num_blocks = pool.num_blocks or num_blocks_for(pool.kv_cache_memory, model, config.block_size, dtype)
    free_bytes, _ = memory_bytes(device)
    if num_blocks * block_bytes > free_bytes:
        raise StartupError(
            f"{num_blocks} KV blocks need {num_blocks * block_bytes / 2**30:.1f} GiB, but only "
            f"{free_bytes / 2**30:.1f} GiB are free: lower kv_cache_memory or num_blocks of this pool"
        )
    return num_blocks


def _fingerprint(config: ClusterConfig, folder: ModelFolder, model: ModelConfig, dtype: str) -> Fingerprint:
    return Fingerprint(
        model=config.model_name,
        revision=folder.revision,
        dtype=dtype,
        kv_dtype=dtype,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
    )
