"""One decoder-only model, described by its config and fed with Hugging Face weights."""

from engine.model.config import ModelConfig, RopeConfig
from engine.model.decoder import DecoderModel

__all__ = ["DecoderModel", "ModelConfig", "RopeConfig"]
