"""What can be known to be wrong before anything is started? Checked in a second or two, without torch."""

from __future__ import annotations

import math
import platform

from cluster.compose import read_api_key
from cluster.config import ClusterConfig, PoolConfig
from cluster.faults import check_faults
from cluster.model_length import max_model_len
from engine.machine import COMPILERS, find_compiler, read_cpu_flags
from engine.model.config import ModelConfig
from engine.model.sharing import require_shareable
from engine.weights import ModelFolder
from protocol.errors import StartupError
from protocol.rank_layout import RankLayout, kv_parts

BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_tile"})
"""A CPU without these computes in float32 when `dtype` is auto."""


def check_configuration(config: ClusterConfig) -> None:
    """Raise `StartupError` for what several processes cannot do, whatever the model."""
    if config.kv_transfer.transport == "loopback":
        raise StartupError(
            "kv_transfer.transport is loopback, which moves KV inside of one process, and each worker here"
            " is one of its own: leave it out, or set it to nixl"
        )
    _check_memory_of_transport(config)
    check_faults(config)
    read_api_key(config)


def _check_memory_of_transport(config: ClusterConfig) -> None:
    """NIXL moves any memory; torch.distributed moves what its backend is for."""
    transport = config.kv_transfer.transport
    are_on_gpus = [bool(config.prefill.num_gpus), bool(config.decode.num_gpus)]
    if transport == "nccl" and not all(are_on_gpus):
        raise StartupError(
            "kv_transfer.transport is nccl, which moves KV between GPUs: give both pools GPUs (num_gpus),"
            " or set it to nixl or gloo"
        )
    if transport == "gloo" and any(are_on_gpus):
        raise StartupError(
            "kv_transfer.transport is gloo, which moves KV in host memory, and num_gpus puts a pool on"
            " GPUs: set it to nixl or nccl"
        )


def warnings_of(config: ClusterConfig) -> list[str]:
    """What works, but not as one might wish."""
    on_cpu = config.ray.address is None and not (config.prefill.num_gpus and config.decode.num_gpus)
    if on_cpu and platform.machine() == "x86_64" and find_compiler() is None:
        return [
            f"no C++ compiler ({', '.join(COMPILERS)}) is installed: torch computes, several times slower"
        ]
    return []


def check_before_start(config: ClusterConfig, folder: ModelFolder) -> None:
    """Raise the `StartupError` that a replica would raise half a minute later."""
    read_api_key(config)
    check_sizes(config, ModelConfig.from_hf(folder.config))
    _ = folder.tokenizer_path


def check_sizes(config: ClusterConfig, model: ModelConfig) -> None:
    """Raise `StartupError` unless the ranks of each pool's workers can share the model, and their KV memory
    holds the longest sequence that is to be served."""
    length = max_model_len(config, model)
    for name, pool in (("prefill", config.prefill), ("decode", config.decode)):
        _check_shareable(name, config, config.layout_of(pool), model)
        _check_holds_longest(name, config, pool, model, length)


def _check_shareable(name: str, config: ClusterConfig, layout: RankLayout, model: ModelConfig) -> None:
    if layout.num_ranks == 1:
        return
    try:
        require_shareable(model, layout, expert_parallel=config.ranks.expert_parallel)
    except StartupError as error:
        raise StartupError(f"{name} workers: {error.message}") from error


def _check_holds_longest(
    name: str, config: ClusterConfig, pool: PoolConfig, model: ModelConfig, length: int
) -> None:
    """The longest sequence must fit, beside the null block; the KV of its last token is never written."""
    block_size = config.block_size_of(pool)
    num_blocks = 1 + math.ceil((length - 1) / block_size)
    if pool.num_blocks is not None:
        if pool.num_blocks < num_blocks:
            raise StartupError(
                f"{name}.num_blocks is {pool.num_blocks}, but max_model_len is {length}, which takes"
                f" {num_blocks} blocks of {block_size} tokens: raise the one or lower the other"
            )
        return
    if pool.kv_cache_share is not None:
        return  # what is free is known when the model is loaded
    least_bytes = num_blocks * least_block_bytes(config, pool, model)
    if pool.kv_cache_memory < least_bytes:
        raise StartupError(
            f"{name}.kv_cache_memory is {pool.kv_cache_memory:,} bytes, but a sequence of max_model_len"
            f" ({length} tokens) takes {least_bytes:,} ({math.ceil(least_bytes / 2**20)}MiB):"
            " raise the one or lower the other"
        )


def least_block_bytes(config: ClusterConfig, pool: PoolConfig, model: ModelConfig) -> int:
    """One block of the rank with the most layers and heads, of the narrowest type where the worker itself
    decides."""
    parts = kv_parts(model.num_layers, model.num_kv_heads, config.layout_of(pool))
    most = max(len(part.layers) * len(part.heads) for part in parts)
    sizes = most, 2, config.block_size_of(pool), model.head_dim
    return math.prod(sizes) * least_element_bytes(config, pool)


def least_element_bytes(config: ClusterConfig, pool: PoolConfig) -> int:
    """Bytes of a number, or of the narrowest one where the worker itself decides."""
    dtype = config.dtype_of(pool)
    if dtype != "auto":
        return 4 if dtype == "float32" else 2
    flags = read_cpu_flags()
    is_here = config.ray.address is None and not pool.num_gpus
    return 4 if is_here and flags and not flags & BFLOAT16_FLAGS else 2
