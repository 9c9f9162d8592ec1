"""How does the KV of a follower's blocks move? By a transport of its own; its leader is told how to use it.

prefill  a pool that decode workers read from, which takes nobody's time here: its endpoint
decode   a reader of its own, which the leader calls over gRPC: the address of that
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from cluster.kv_transport import RankAddress, endpoint_to_text, make_transport
from cluster.rank_parts import RankParts
from cluster.ranks.spec import RankSpec
from kv_transfer import LayoutReader, LoopbackNetwork
from protocol.errors import SplitserveError
from protocol.ids import Role

LISTEN_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0


@contextmanager
def kv_side(
    spec: RankSpec,
    parts: RankParts,
    network: LoopbackNetwork | None,
    on_fault: Callable[[SplitserveError], None],
) -> Iterator[str]:
    """Open while the follower runs; gives what the leader is told. `network` as for `create_transport`.

    `on_fault` is called, on any thread, when it broke later. Raises `StartupError`.
    """
    open_side = _readable_pool if spec.role is Role.PREFILL else _reader
    with open_side(spec, parts, network, on_fault) as told:
        yield told


@contextmanager
def _readable_pool(
    spec: RankSpec,
    parts: RankParts,
    network: LoopbackNetwork | None,
    on_fault: Callable[[SplitserveError], None],
) -> Iterator[str]:
    transport = make_transport(spec.cluster_config(), _address(spec, network), parts.pool_memory)
    try:
        yield endpoint_to_text(transport.endpoint)
    finally:
        transport.close()


@contextmanager
def _reader(
    spec: RankSpec,
    parts: RankParts,
    network: LoopbackNetwork | None,
    on_fault: Callable[[SplitserveError], None],
) -> Iterator[str]:
    from decode_worker import RankReadServer

    make = partial(make_transport, spec.cluster_config(), _address(spec, network))
    server = RankReadServer(
        LayoutReader(parts.pool_memory, parts.fingerprint, make, rank=spec.rank),
        host=spec.host,
        port=0,
        token=spec.token,
        on_fault=on_fault,
    )
    try:
        yield server.start(LISTEN_TIMEOUT_S)
    finally:
        server.stop(STOP_TIMEOUT_S)


def _address(spec: RankSpec, network: LoopbackNetwork | None) -> RankAddress:
    return RankAddress(spec.identity, spec.host, network, spec.rank)
