"""The directory of a cluster without Ray: a small gRPC server, and the client that its processes hold.

The server keeps nothing on disk. Workers announce themselves each second, so that one that was
restarted on the same address knows the whole cluster again a second later.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from cluster.directory import DirectoryState
from protocol.codec import identity_from_wire, identity_to_wire, record_from_wire, record_to_wire
from protocol.ids import WorkerIdentity
from protocol.membership import WorkerRecord
from protocol.ports import Clock
from protocol.wire import splitserve_pb2 as pb
from protocol.wire.splitserve_pb2_grpc import (
    DirectoryServicer,
    DirectoryStub,
    add_DirectoryServicer_to_server,
)
from rpc import RunningServer, open_channel, rpc_errors, start_server

DIRECTORY_TIMEOUT_S = 2.0


class DirectoryService(DirectoryServicer):
    """The `Directory` service around one `DirectoryState`."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._state = DirectoryState(clock)

    async def Announce(self, request: pb.WorkerRecord, context: Any) -> pb.AnnounceReply:
        self._state.announce(record_from_wire(request))
        return pb.AnnounceReply()

    async def Withdraw(self, request: pb.Identity, context: Any) -> pb.WithdrawReply:
        self._state.withdraw(identity_from_wire(request))
        return pb.WithdrawReply()

    async def Workers(self, request: pb.WorkersRequest, context: Any) -> pb.WorkersReply:
        return pb.WorkersReply(workers=map(record_to_wire, self._state.workers()))


async def serve_directory(
    host: str, port: int, token: str, *, clock: Clock = time.monotonic
) -> RunningServer:
    """Serve an empty directory on `host`:`port` (0: any free one). Raises `StartupError`."""
    service = DirectoryService(clock)
    return await start_server([partial(add_DirectoryServicer_to_server, service)], host, port, token)


class GrpcDirectory:
    """The `Directory` at an address. Made and used on one event loop; close it when done.

    Every call ends within `timeout_s`, with `WorkerUnavailable` when the server did not answer; a server
    that is back before then is found.
    """

    def __init__(self, address: str, token: str, timeout_s: float = DIRECTORY_TIMEOUT_S) -> None:
        self._peer = f"the directory at {address}"
        self._options: dict[str, Any] = {"timeout": timeout_s, "wait_for_ready": True}
        self._channel = open_channel(address, token)
        self._stub: Any = DirectoryStub(self._channel)

    async def announce(self, record: WorkerRecord) -> None:
        with rpc_errors(self._peer):
            await self._stub.Announce(record_to_wire(record), **self._options)

    async def withdraw(self, identity: WorkerIdentity) -> None:
        with rpc_errors(self._peer):
            await self._stub.Withdraw(identity_to_wire(identity), **self._options)

    async def workers(self) -> tuple[WorkerRecord, ...]:
        with rpc_errors(self._peer):
            reply: pb.WorkersReply = await self._stub.Workers(pb.WorkersRequest(), **self._options)
        return tuple(map(record_from_wire, reply.workers))

    async def close(self) -> None:
        """Idempotent."""
        await self._channel.close(None)
