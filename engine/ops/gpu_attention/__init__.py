"""Attention by libraries, for GPUs that they know; all else is Triton's. Importing this needs `triton`"""

from engine.ops.gpu_attention.choose import ops_with_library
from engine.ops.gpu_attention.ops import LibraryOps

__all__ = ["LibraryOps", "ops_with_library"]
