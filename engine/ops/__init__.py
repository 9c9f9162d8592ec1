"""The arithmetic of the model behind one port, with an implementation per kind of device."""

from engine.ops.choose import choose_ops
from engine.ops.port import (
    BatchLayout,
    Drawer,
    Linear,
    LinearStack,
    Ops,
    Recorder,
    Recording,
    RotatingAttention,
    Routing,
    StepAttention,
    UploadedAttention,
)
from engine.ops.torch_ops import TorchOps

__all__ = [
    "BatchLayout",
    "Drawer",
    "Linear",
    "LinearStack",
    "Ops",
    "Recorder",
    "Recording",
    "RotatingAttention",
    "Routing",
    "StepAttention",
    "TorchOps",
    "UploadedAttention",
    "choose_ops",
]
