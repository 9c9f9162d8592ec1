"""How does a decode worker talk to the owner of held blocks?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import grpc

from protocol.codec import (
    endpoint_from_wire,
    fingerprint_from_wire,
    fingerprint_to_wire,
    identity_from_wire,
    identity_to_wire,
)
from protocol.errors import TransferFailed
from protocol.handoff import Fingerprint, LeaseStatus, Released, Ticket, TransportEndpoint, Verdict
from protocol.ids import WorkerIdentity
from protocol.wire import splitserve_pb2 as pb
from protocol.wire.splitserve_pb2_grpc import PrefillWorkerStub
from rpc import rpc_errors

ANSWER_LIMIT_S = 2.0
"""How long an answer to a renewal may take beyond the time that it was asked to wait."""


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

    async def renew(self, ticket: Ticket, tokens_known: int, wait_s: float) -> LeaseStatus:
        """Answered when more than `tokens_known` tokens are ready, the lease is lost, or `wait_s` is over;
        `ANSWER_LIMIT_S` later it fails."""

    async def release(self, ticket: Ticket, reader: str, wants_checksums: bool) -> Released:
        """`reader` names one reading of the ticket: asked again by the same, the verdict is the same."""

    async def close(self) -> None: ...


class GrpcOwner:
    """An owner at the far end of a gRPC channel."""

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        reader: WorkerIdentity,
        fingerprint: Fingerprint,
        timeout_s: float,
    ) -> None:
        """`channel` leads to `address`, and is closed with this."""
        self._address = address
        self._hello = pb.ConnectRequest(
            reader=identity_to_wire(reader), fingerprint=fingerprint_to_wire(fingerprint)
        )
        self._timeout_s = timeout_s
        self._channel = channel
        self._stub = PrefillWorkerStub(channel)

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

    async def renew(self, ticket: Ticket, tokens_known: int, wait_s: float) -> LeaseStatus:
        request = pb.RenewRequest(
            incarnation=ticket.owner.incarnation,
            ticket_id=ticket.ticket_id,
            tokens_known=tokens_known,
            wait_s=wait_s,
        )
        with rpc_errors(self._address):
            reply = await self._stub.Renew(request, timeout=wait_s + ANSWER_LIMIT_S)
        return LeaseStatus(reply.held, reply.tokens_ready, reply.lease_s)

    async def release(self, ticket: Ticket, reader: str, wants_checksums: bool) -> Released:
        request = pb.ReleaseRequest(
            incarnation=ticket.owner.incarnation,
            ticket_id=ticket.ticket_id,
            reader=reader,
            wants_checksums=wants_checksums,
        )
        with rpc_errors(self._address):
            reply = await self._stub.Release(request, timeout=self._timeout_s)
        try:
            return Released(Verdict(reply.verdict), tuple(reply.checksums))
        except ValueError:
            return Released(Verdict.UNKNOWN)  # a word of another version is no VALID

    async def close(self) -> None:
        await self._channel.close(None)
