"""Where weights come from: finding a model, converting GGUF, reading safetensors.

    spec --resolve_model--> ModelFolder --load_packed--> ModelWeights
                                 \\--load_weights--> {Hugging Face name: tensor}

Imports no torch by itself; the two that load do.
"""

from engine.weights.demo import demo_model_path
from engine.weights.folder import ModelFolder
from engine.weights.load import load_weights
from engine.weights.packed import load_packed
from engine.weights.progress import Progress, SilentProgress, console_progress
from engine.weights.resolve import resolve_model
from engine.weights.survey import ModelState, ModelSurvey, survey_model

__all__ = [
    "ModelFolder",
    "ModelState",
    "ModelSurvey",
    "Progress",
    "SilentProgress",
    "console_progress",
    "demo_model_path",
    "load_packed",
    "load_weights",
    "resolve_model",
    "survey_model",
]
