"""How does the leader let another rank of its worker read? By calls that it starts and looks at later."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import grpc

from protocol.codec import endpoint_to_wire, fingerprint_to_wire
from protocol.errors import LayoutMismatch, SplitserveError, TransferFailed
from protocol.handoff import Fingerprint, TransportEndpoint
from protocol.ids import BlockId
from protocol.ports import FetchStatus
from protocol.wire import splitserve_pb2 as pb
from protocol.wire.splitserve_pb2_grpc import KvRankStub
from rpc import error_from_rpc, open_blocking_channel

CALL_LIMIT_S = 5.0
"""For a rank to connect or to disconnect. A read has no limit here: it ends when it ends."""

KEEPALIVE_S = 20.0
"""A rank that stands still for some seconds, as on a busy machine, goes on afterwards, and its reads with
it: a call that is cut off meanwhile costs the whole worker. Whether the rank is gone, its steps tell."""

_log = logging.getLogger(__name__)


class RankProxy:
    """Another rank's `KvReader`, over gRPC. Used by one thread, which none of the calls holds up."""

    def __init__(self, rank: int, address: str, token: str, *, call_limit_s: float = CALL_LIMIT_S) -> None:
        """`address` is that of the rank's `RankReadServer`."""
        self.name = f"rank {rank} at {address}"
        self._channel = open_blocking_channel(address, token, keepalive_s=KEEPALIVE_S)
        self._stub = KvRankStub(self._channel)
        self._call_limit_s = call_limit_s
        self.is_lost = False
        """A read's call broke: whether the read goes on is not known, and nothing else is read there."""

    def connect(self, peer: TransportEndpoint, fingerprint: Fingerprint) -> RankCall:
        request = pb.RankConnectRequest(
            peer=endpoint_to_wire(peer), fingerprint=fingerprint_to_wire(fingerprint)
        )
        return RankCall(self._stub.Connect.future(request, timeout=self._call_limit_s), self.name)

    def disconnect(self, agent: str) -> RankCall:
        """A rank that has ended has let go of everybody."""
        request = pb.RankDisconnectRequest(agent=agent)
        call = self._stub.Disconnect.future(request, timeout=self._call_limit_s)
        return RankCall(call, self.name, is_needless_when=grpc.StatusCode.UNAVAILABLE)

    def fetch_tokens(
        self, agent: str, remote_table: Sequence[BlockId], local_table: Sequence[BlockId], tokens: range
    ) -> RankFetch:
        request = pb.RankFetchRequest(
            agent=agent,
            remote_table=remote_table,
            local_table=local_table,
            first_token=tokens.start,
            end_token=tokens.stop,
        )
        return RankFetch(self, self._stub.Fetch.future(request))

    def check(self) -> None:
        """Raise `TransferFailed` when this rank is lost."""
        if self.is_lost:
            raise TransferFailed(f"{self.name} is lost: this worker reads no KV any more")

    def lose(self, error: BaseException) -> None:
        """Its blocks may still be written to, until the worker is replaced."""
        if not self.is_lost:
            _log.error(
                "%s is lost, a read there may never end: %s", self.name, _translated(error, self.name)
            )
        self.is_lost = True

    def close(self) -> None:
        """Calls in flight are cut off. Idempotent."""
        self._channel.close()


class RankCall:
    """A call under way."""

    def __init__(self, future: Any, name: str, *, is_needless_when: grpc.StatusCode | None = None) -> None:
        self._future = future
        self._name = name
        self._is_needless_when = is_needless_when

    def error(self) -> SplitserveError | None:
        """What the call came to; waits for it, up to its limit."""
        try:
            self._future.result()
        except grpc.RpcError as error:
            is_needless = error.code() is self._is_needless_when
            return None if is_needless else _translated(error, self._name)
        except grpc.FutureCancelledError as error:
            return _translated(error, self._name)
        return None


class RankFetch:
    """A read at another rank. Pending for ever when the rank is lost, since it may still be going on."""

    def __init__(self, rank: RankProxy, future: Any) -> None:
        self._rank = rank
        self._future = future
        self._status = FetchStatus.PENDING
        self._is_lost = False

    def poll(self) -> FetchStatus:
        if self._status is FetchStatus.PENDING and not self._is_lost and self._future.done():
            self._take_answer()
        return self._status

    def release(self) -> None:
        if self._status is FetchStatus.PENDING:
            raise TransferFailed(f"a read at {self._rank.name} is still pending")

    def _take_answer(self) -> None:
        try:
            reply = self._future.result()
            status = FetchStatus(reply.status)
        except (grpc.RpcError, grpc.FutureCancelledError, ValueError) as error:
            self._is_lost = True
            self._rank.lose(error)
            return
        if reply.trouble:
            _log.warning("%s: %s", self._rank.name, reply.trouble)
        self._status = status


def _translated(error: BaseException, name: str) -> SplitserveError:
    """As `KvReader.connect` raises them."""
    if not isinstance(error, grpc.RpcError):
        return TransferFailed(f"{name}: {type(error).__name__}: {error}")
    found = error_from_rpc(error, name)
    if isinstance(found, LayoutMismatch | TransferFailed):
        return found
    return TransferFailed(found.message)
