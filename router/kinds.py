"""Which workers may work on one request? Versions mix in a rolling update."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeVar

from protocol.handoff import Fingerprint
from router.ports import Worker

W = TypeVar("W", bound=Worker)

Content = tuple[str, str, str, str]
Pairing = tuple[str | int, ...]


def content_of(fingerprint: Fingerprint) -> Content:
    """What decides which tokens a worker makes of a prompt."""
    return fingerprint.model, fingerprint.revision, fingerprint.dtype, fingerprint.kv_dtype


def pairing_of(fingerprint: Fingerprint) -> Pairing:
    """What must be alike for one worker's KV to be of use to another. A reader converts all else."""
    return (
        fingerprint.model,
        fingerprint.revision,
        fingerprint.num_layers,
        fingerprint.num_kv_heads,
        fingerprint.head_dim,
        fingerprint.kv_layout,
        fingerprint.wire_version,
    )


def of_contents(workers: Iterable[W], contents: Collection[Content]) -> list[W]:
    """Those that may go on with a request that workers of `contents` began; all, where nobody did."""
    return [worker for worker in workers if not contents or content_of(worker.fingerprint) in contents]


def paired_with(workers: Iterable[W], others: Iterable[Worker]) -> list[W]:
    """Those whose KV is of use to one of the others, or the other way round."""
    pairings = {pairing_of(other.fingerprint) for other in others}
    return [worker for worker in workers if pairing_of(worker.fingerprint) in pairings]
