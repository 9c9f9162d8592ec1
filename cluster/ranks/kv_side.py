"""How does the KV of a follower's blocks move? With a transport of its own, of which its leader is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from cluster.kv_transport import endpoint_to_text, make_transport
from cluster.rank_parts import RankParts
from cluster.ranks.spec import RankSpec
from kv_transfer import LoopbackNetwork


@dataclass(frozen=True, slots=True)
class KvSide:
    """A follower's part in the hand-off, until it is closed. Use as a context manager."""

    told: str
    """What the leader is told of it."""
    close: Callable[[], None]

    def __enter__(self) -> KvSide:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_kv_side(spec: RankSpec, parts: RankParts, network: LoopbackNetwork | None) -> KvSide:
    """Of a prefill worker's rank: a pool that others read from. Raises `StartupError`."""
    config = spec.cluster_config()
    transport = make_transport(config, spec.identity, network, parts.pool_memory, rank=spec.rank)
    return KvSide(endpoint_to_text(transport.endpoint), transport.close)
