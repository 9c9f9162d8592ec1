"""The ops in Triton, for NVIDIA and AMD GPUs. Importing this needs `triton`: only engines on GPUs do."""

from engine.ops.triton.blocks import gather_parts, scatter_parts
from engine.ops.triton.ops import TritonOps
from engine.ops.triton.tuning import Tuning

__all__ = ["TritonOps", "Tuning", "gather_parts", "scatter_parts"]
