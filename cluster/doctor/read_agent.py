"""A process that owns blocks, or reads them, as a worker would: started for one timed read.

    read_agent own PLAN     prints {"endpoint": ...}, and lives until its stdin ends
    read_agent read PLAN    gets that line on its stdin, prints {"first_s": ..., "seconds": ...}

PLAN is `ReadPlan.to_json()`. What goes wrong is printed as {"error": ...}.
"""

from __future__ import annotations

import base64
import json
import secrets
import statistics
import sys
import time

from cluster.doctor.read_plan import ReadPlan
from kv_transfer import PoolMemory, agent_name, create_transport
from protocol.codec import endpoint_from_wire, endpoint_to_wire
from protocol.errors import SplitserveError, TransferFailed
from protocol.handoff import TransportEndpoint
from protocol.ids import BlockId, WorkerId, WorkerIdentity
from protocol.ports import FetchStatus, KvTransport
from protocol.wire import splitserve_pb2 as pb

READ_LIMIT_S = 20.0
ENOUGH_S = 1.0
"""A slow transport is known after fewer reads."""


def main(role: str, plan: ReadPlan) -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # NIXL looks for it, and it takes seconds
    try:
        _own(plan) if role == "own" else _read(plan)
    except SplitserveError as error:
        _say(error=error.message)


def _own(plan: ReadPlan) -> None:
    memory, transport = _pool(plan)
    for block in range(1, memory.num_blocks):
        memory.block_view(BlockId(block))[:] = _content(block, plan)
    _say(endpoint=base64.b64encode(endpoint_to_wire(transport.endpoint).SerializeToString()).decode())
    sys.stdin.read()
    transport.close()


def _read(plan: ReadPlan) -> None:
    told = json.loads(sys.stdin.readline())["endpoint"]
    peer = endpoint_from_wire(pb.TransportEndpoint.FromString(base64.b64decode(told)))
    memory, transport = _pool(plan)
    transport.connect(peer)
    first_s = _timed_read(transport, peer, plan)
    later_s = [_timed_read(transport, peer, plan)]
    while len(later_s) < plan.max_repeats and sum(later_s) < ENOUGH_S:
        later_s.append(_timed_read(transport, peer, plan))
    _check_content(memory, plan)
    transport.close()  # UCX says how it read when its connection ends
    _say(first_s=first_s, seconds=statistics.median(later_s))


def _pool(plan: ReadPlan) -> tuple[PoolMemory, KvTransport]:
    memory = PoolMemory.allocate(1 + plan.num_blocks, plan.block_bytes)  # one more: the null block
    name = agent_name(WorkerIdentity(WorkerId("doctor"), secrets.token_hex(8)), rank=0)
    return memory, create_transport("nixl", memory, name)


def _timed_read(transport: KvTransport, peer: TransportEndpoint, plan: ReadPlan) -> float:
    """Seconds. Raises `TransferFailed`."""
    blocks = [BlockId(block) for block in range(1, 1 + plan.num_blocks)]
    started_s = time.monotonic()
    fetch = transport.fetch(peer.agent, blocks, blocks)
    while (status := fetch.poll()) is FetchStatus.PENDING:
        if time.monotonic() > started_s + READ_LIMIT_S:
            raise TransferFailed(f"a read did not end within {READ_LIMIT_S:.0f} s")
    if status is FetchStatus.FAILED:
        raise TransferFailed("a read failed: the other side is gone, or no transport reaches it")
    return time.monotonic() - started_s


def _content(block: int, plan: ReadPlan) -> bytes:
    return bytes([1 + block % 255]) * plan.block_bytes


def _check_content(memory: PoolMemory, plan: ReadPlan) -> None:
    wrong = [b for b in range(1, memory.num_blocks) if memory.block_view(BlockId(b)) != _content(b, plan)]
    if wrong:
        raise TransferFailed(
            f"{len(wrong)} of {plan.num_blocks} blocks arrived with other bytes than were sent"
        )


def _say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], ReadPlan.from_json(sys.argv[2]))
