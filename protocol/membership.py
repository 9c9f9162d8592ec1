"""Who lives in the cluster: what a worker tells the directory about itself."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.handoff import Fingerprint
from protocol.ids import Role, WorkerIdentity


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is; rides on every frame and every announcement."""

    num_running: int = 0
    num_waiting: int = 0
    num_held: int = 0
    """Sequences whose blocks wait for a reader (prefill) or for a fetch (decode)."""
    num_waiting_tokens: int = 0
    """Prompt tokens not computed yet, over all sequences."""
    blocks_total: int = 0
    blocks_free: int = 0
    """Blocks that can be handed out now, cached ones that may be evicted included."""
    blocks_cached: int = 0
    progress: int = 0
    """Grows while the engine computes, within its steps, too; only its growth means anything."""


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One living worker."""

    identity: WorkerIdentity
    role: Role
    address: str
    """host:port of its gRPC server."""
    fingerprint: Fingerprint
    max_model_len: int
    load: Load = Load()
    draining: bool = False
    ops: str = ""
    """What its engine computes with, for people: "C++ avx2", "torch"."""
