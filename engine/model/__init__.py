"""One decoder-only model, described by its config and fed with Hugging Face weights.

The config needs no torch; the model is imported with the first mention of it, so that a router that
asks for a model's context length does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.model.config import ModelConfig, RopeConfig

if TYPE_CHECKING:
    from engine.model.decoder import DecoderModel

__all__ = ["DecoderModel", "ModelConfig", "RopeConfig"]


def __getattr__(name: str) -> type:
    if name == "DecoderModel":
        from engine.model.decoder import DecoderModel

        return DecoderModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
