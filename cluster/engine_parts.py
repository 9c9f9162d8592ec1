"""From the configuration to one loaded engine: model, KV cache, scheduler. Imports torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.config import ClusterConfig, PoolConfig
from cluster.model_length import max_model_len
from cluster.provided_engine import OnEvents, ProvidedEngine
from cluster.threads import threads_per_engine
from engine import Command, EngineCore, EngineThread, SchedulerConfig
from engine.device import limit_threads, memory_bytes, select_device, select_dtype
from engine.graph_runner import capture_for
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
from engine.ops import choose_ops
from engine.runner import ModelRunner
from engine.weights import ModelFolder, Progress, load_packed
from kv_transfer import PoolMemory, Provision
from protocol.errors import StartupError
from protocol.handoff import Fingerprint
from rpc import Engine

logger = logging.getLogger(__name__)


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
        def make(on_events: OnEvents) -> Engine[Command]:
            return EngineThread(self.make_core(), on_events, name, progress=lambda: self.runner.progress)

        if self.kv_cache.blocks.device.type != "cpu":
            return make(on_events)  # such memory is there from the start
        return ProvidedEngine(make, Provision(self.pool_memory), on_events)

    @property
    def pool_memory(self) -> PoolMemory:
        return PoolMemory(
            address=self.kv_cache.data_ptr,
            num_blocks=self.kv_cache.num_blocks,
            block_bytes=self.kv_cache.block_bytes,
            owner=self.kv_cache,
        )


def build_engine(
    config: ClusterConfig,
    pool: PoolConfig,
    folder: ModelFolder,
    progress: Progress | None = None,
    end_phase: Callable[[str], None] = lambda phase: None,
) -> EngineParts:
    """Load the model and lay out its KV cache. Takes seconds. Raises `StartupError`.

    `end_phase` hears when kernels and weights are loaded, and when the rest is done.
    """
    num_threads = threads_per_engine(config, pool)
    limit_threads(num_threads)
    model_config = ModelConfig.from_hf(folder.config)
    length = max_model_len(config, model_config)
    device = select_device("auto" if pool.num_gpus else "cpu")
    dtype = select_dtype(config.dtype_of(pool), device)
    ops = choose_ops(
        device,
        dtype,
        head_dim=model_config.head_dim,
        num_threads=num_threads,
        cache_dir=config.cache_dir.expanduser() / "cpu-ops",
    )
    weights = load_packed(
        folder,
        model_config,
        ops,
        device=device,
        dtype=dtype,
        cache_dir=config.cache_dir.expanduser() / "packed",
        progress=progress,
    )
    end_phase("weights")
    model = DecoderModel(model_config, weights, ops, device=device, dtype=dtype, max_model_len=length)
    kv_cache = _lay_out_cache(config, pool, model)
    host_pool = _lay_out_host_pool(pool, kv_cache)
    runner = ModelRunner(
        model,
        kv_cache,
        tuple(folder.eos_token_ids),
        host_pool,
        capture=capture_for(ops, device),
        max_sequences=pool.max_num_seqs,
    )
    runner.warm_up()
    end_phase("engine")
    return EngineParts(
        runner=runner,
        kv_cache=kv_cache,
        scheduler=_scheduler_config(config, pool, kv_cache, host_pool, length),
        eos_token_ids=frozenset(folder.eos_token_ids),
        fingerprint=_fingerprint(config, folder, model, kv_cache),
    )


def _lay_out_cache(config: ClusterConfig, pool: PoolConfig, model: DecoderModel) -> KvCache:
    sizes = model.config, config.block_size_of(pool), model.dtype
    free_bytes, _ = memory_bytes(model.device)
    if pool.num_blocks is not None:
        num_blocks = pool.num_blocks
    elif pool.kv_cache_share is not None:
        num_blocks = num_blocks_from_share(pool.kv_cache_share, free_bytes, *sizes)
    else:
        num_blocks = num_blocks_for(pool.kv_cache_memory, *sizes)
    require_room(num_blocks, block_bytes_for(*sizes), free_bytes)
    require_length(num_blocks, config.block_size_of(pool), model.max_model_len)
    logger.info("%d KV blocks of %d tokens", num_blocks - 1, config.block_size_of(pool))
    return KvCache(
        model.config,
        num_blocks=num_blocks,
        block_size=config.block_size_of(pool),
        dtype=model.dtype,
        device=model.device,
    )


def _lay_out_host_pool(pool: PoolConfig, kv_cache: KvCache) -> HostKvPool | None:
    num_blocks = pool.swap_memory // kv_cache.block_bytes
    if pool.preemption != "swap":
        return None
    if num_blocks < 1:
        raise StartupError(
            "preemption is swap, but swap_memory holds no block of "
            f"{kv_cache.block_bytes:,} bytes: raise it"
        )
    return HostKvPool(kv_cache, num_blocks)


def _scheduler_config(
    config: ClusterConfig, pool: PoolConfig, kv_cache: KvCache, host_pool: HostKvPool | None, length: int
) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=kv_cache.num_blocks,
        block_size=config.block_size_of(pool),
        max_model_len=length,
        max_num_seqs=pool.max_num_seqs,
        max_num_batched_tokens=pool.max_num_batched_tokens,
        max_num_prefill_tokens=pool.max_num_prefill_tokens,
        max_num_waiting=pool.max_num_waiting,
        overload_retry_after_s=pool.overload_retry_after_s,
        enable_prefix_caching=config.enable_prefix_caching,
        low_watermark=pool.low_watermark,
        high_watermark=pool.high_watermark,
        policy=pool.policy,
        ageing_tokens=pool.ageing_tokens,
        preemption=pool.preemption,
        num_host_blocks=host_pool.num_blocks if host_pool else 0,
        long_prefill_token_threshold=pool.long_prefill_token_threshold,
    )


def _fingerprint(
    config: ClusterConfig, folder: ModelFolder, model: DecoderModel, kv_cache: KvCache
) -> Fingerprint:
    sizes, dtype = model.config, str(model.dtype).removeprefix("torch.")
    return Fingerprint(
        model=config.model_name,
        revision=folder.revision,
        dtype=dtype,
        kv_dtype=dtype,
        num_layers=sizes.num_layers,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        block_size=kv_cache.block_size,
    )
