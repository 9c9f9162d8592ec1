"""How long may prompt + output be?"""

from __future__ import annotations

from cluster.config import ClusterConfig
from engine.model.config import ModelConfig
from protocol.errors import StartupError


def max_model_len(config: ClusterConfig, model: ModelConfig) -> int:
    """Longest prompt + output that is served. Raises `StartupError` when the model cannot."""
    wanted = config.max_model_len or model.max_model_len
    if wanted > model.max_model_len:
        raise StartupError(
            f"max_model_len is {wanted}, but the model was trained for {model.max_model_len} tokens: "
            "lower it"
        )
    return wanted
