"""The arithmetic of the model behind one port, with an implementation per kind of device."""

from engine.ops.choose import choose_ops
from engine.ops.port import BatchLayout, Linear, Ops, StepAttention
from engine.ops.torch_ops import TorchOps

__all__ = ["BatchLayout", "Linear", "Ops", "StepAttention", "TorchOps", "choose_ops"]
