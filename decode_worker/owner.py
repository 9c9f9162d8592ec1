"""How does a decode worker talk to the owner of held blocks?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from protocol.codec import (
    endpoint_from_wire,
    fingerprint_from_wire,
    fingerprint_to_wire,
    identity_from_wire,
    identity_to_wire,
)
from protocol.errors import TransferFailed
from protocol.handoff import Fingerprint, LeaseStatus, Ticket, TransportEndpoint, Verdict
from protocol.ids import WorkerIdentity
from protocol.wire import splitserve_pb2 as pb
from protocol.wire.splitserve_pb2_grpc import PrefillWorkerStub
from rpc import open_channel, rpc_errors


@dataclass(frozen=True, slots=True)
class OwnerHello:
    """What an owner says about itself when a reader connects."""

    identity: WorkerIdentity
    fingerprint: Fingerprint
    endpoint: TransportEndpoint


class Owner(Protocol):
    """The owner's side of the hand-off. Every call is bounded and raises errors of the tree."""

    async def connect(self) -> OwnerHello:
        """Introduce this reader. Raises `LayoutMismatch` when the owner refuses its fingerprint."""

    async def renew(self, ticket: Ticket) -> LeaseStatus: ...

    async def release(self, ticket: Ticket) -> Verdict: ...

    async def close(self) -> None: ...


class GrpcOwner:
    """An owner at the far end of a gRPC channel, which connects at the first call."""

    def __init__(
        self, address: str, token: str, reader: WorkerIdentity, fingerprint: Fingerprint, timeout_s: float
    ) -> None:
        self._address = address
        self._hello = pb.ConnectRequest(
            reader=identity_to_wire(reader), fingerprint=fingerprint_to_wire(fingerprint)
        )
        self._timeout_s = timeout_s
        self._channel = open_channel(address, token)
        self._stub = PrefillWorkerStub(self._channel)

    async def connect(self) -> OwnerHello:
        with rpc_errors(self._address):
            reply = await self._stub.Connect(self._hello, timeout=self._timeout_s)
        try:
            return OwnerHello(
                identity_from_wire(reply.owner),
                fingerprint_from_wire(reply.fingerprint),
                endpoint_from_wire(reply.endpoint),
            )
        except ValueError as error:
            raise TransferFailed(f"{self._address} sent a greeting without an identity") from error

    async def renew(self, ticket: Ticket) -> LeaseStatus:
        request = pb.RenewRequest(incarnation=ticket.owner.incarnation, ticket_id=ticket.ticket_id)
        with rpc_errors(self._address):
            reply = await self._stub.Renew(request, timeout=self._timeout_s)
        return LeaseStatus(reply.held, reply.tokens_ready, reply.lease_s)

    async def release(self, ticket: Ticket) -> Verdict:
        request = pb.ReleaseRequest(incarnation=ticket.owner.incarnation, ticket_id=ticket.ticket_id)
        with rpc_errors(self._address):
            reply = await self._stub.Release(request, timeout=self._timeout_s)
        try:
            return Verdict(reply.verdict)
        except ValueError:
            return Verdict.UNKNOWN  # a word of another version is no VALID

    async def close(self) -> None:
        await self._channel.close(None)
