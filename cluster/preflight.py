"""What can be known to be wrong before anything is started? Checked in a second or two, without torch."""

from __future__ import annotations

import math

from cluster.compose import read_api_key
from cluster.config import ClusterConfig, PoolConfig
from cluster.model_length import max_model_len
from engine.model.config import ModelConfig
from engine.weights import ModelFolder
from protocol.errors import StartupError

MIN_ELEMENT_BYTES = 2
"""Of the narrowest number type; `dtype: auto` is decided where the worker runs."""


def check_before_start(config: ClusterConfig, folder: ModelFolder) -> None:
    """Raise the `StartupError` that a replica would raise half a minute later."""
    read_api_key(config)
    model = ModelConfig.from_hf(folder.config)
    max_model_len(config, model)
    _ = folder.tokenizer_path
    for name, pool in (("prefill", config.prefill), ("decode", config.decode)):
        _check_holds_a_block(name, config, pool, model)


def _check_holds_a_block(name: str, config: ClusterConfig, pool: PoolConfig, model: ModelConfig) -> None:
    if pool.num_blocks is not None or pool.kv_cache_share is not None:
        return
    elements = math.prod((model.num_layers, 2, model.num_kv_heads, config.block_size, model.head_dim))
    least_bytes = 2 * elements * (4 if config.dtype == "float32" else MIN_ELEMENT_BYTES)
    if pool.kv_cache_memory < least_bytes:
        raise StartupError(
            f"{name}.kv_cache_memory is {pool.kv_cache_memory:,} bytes, but two blocks of "
            f"{config.block_size} tokens of this model take {least_bytes:,}: raise it"
        )
