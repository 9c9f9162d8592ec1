"""Which kind of group carries the bytes of a pool?"""

from __future__ import annotations

from kv_transfer.memory import PoolMemory
from kv_transfer.pairs.gloo_group import GlooFabric
from kv_transfer.pairs.group import Fabric
from kv_transfer.pairs.nccl_group import NcclFabric

GLOO, NCCL = "gloo", "nccl"


def make_fabric(kind: str, memory: PoolMemory, host: str) -> Fabric:
    """`host` is this machine's address, as readers and owners reach it.

    Raises `StartupError`, which says what to do, for memory that the kind does not move.
    """
    return NcclFabric(memory) if kind == NCCL else GlooFabric(memory, host)
