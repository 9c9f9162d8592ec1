"""What does a prefill worker do for one router? It runs prompts and hands tickets out.

Life of one request here:

    submit ──> queued ──blocks──> computing ──first token──> PrefillDone + ticket (blocks HELD)
                  │                   │              \\──finished with it──> PrefillDone, nothing held
                  └──── abort, deadline, session end, fault ──> dropped from the engine

The end of the session drops what was not handed out. A ticket that left lives on until its lease ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from engine import (
    AbortSequence,
    AddSequence,
    BlocksAllocated,
    Command,
    Event,
    PrefillProgressed,
    SequenceFailed,
    TokensSampled,
)
from prefill_worker.holder import Holder
from prefill_worker.metrics import PrefillMetrics
from protocol.codec import delta_to_wire, failure_to_wire, load_to_wire, request_from_wire, ticket_to_wire
from protocol.errors import DeadlineExceeded, InvalidRequest, SplitserveError
from protocol.generation import GenerationRequest, Receipt, TokenDelta
from protocol.ids import BlockId, RequestId, SequenceId, TicketId
from protocol.ports import Clock
from protocol.wire import splitserve_pb2 as pb
from rpc import EngineLink, FrameOutbox


@dataclass(slots=True)
class Prefill:
    """One request between submission and hand-off."""

    request: GenerationRequest
    seq_id: SequenceId
    received_s: float
    deadline: asyncio.TimerHandle
    allocated_s: float | None = None
    block_ids: tuple[BlockId, ...] = ()
    tokens_ready: int = 0

    def receipt(self, now_s: float, num_cached_tokens: int) -> Receipt:
        allocated_s = now_s if self.allocated_s is None else self.allocated_s
        return Receipt(
            prefill_queue_s=allocated_s - self.received_s,
            prefill_s=now_s - allocated_s,
            num_cached_tokens=num_cached_tokens,
        )


class PrefillSession:
    """The requests of one router. Used on one event loop."""

    def __init__(
        self,
        engine: EngineLink[Command, Event],
        holder: Holder,
        refusal: Callable[[], SplitserveError | None],
        metrics: PrefillMetrics,
        clock: Clock,
    ) -> None:
        """`refusal` says why no new request can be taken now."""
        self._engine = engine
        self._holder = holder
        self._refusal = refusal
        self._metrics = metrics
        self._clock = clock
        self._prefills: dict[RequestId, Prefill] = {}
        self.outbox: FrameOutbox[pb.PrefillFrame] = FrameOutbox(pb.PrefillFrame, self._stamp)

    def __len__(self) -> int:
        return len(self._prefills)

    def on_command(self, command: pb.PrefillCommand) -> None:
        """Carry out one command; what goes wrong is told in a frame."""
        kind = command.WhichOneof("command")
        if kind == "submit":
            self._submit(request_from_wire(command.submit))
        elif kind == "abort_request_id":
            self._abort(RequestId(command.abort_request_id))
        elif kind == "release_ticket_id":
            self._holder.drop(TicketId(command.release_ticket_id))

    def end(self) -> None:
        """Drop whatever was not handed out, tickets in unwritten frames included. Idempotent."""
        for request_id in list(self._prefills):
            self._abort(request_id)
        for frame in self.outbox.unsent():
            for done in frame.done:
                if done.HasField("ticket"):
                    self._holder.drop(TicketId(done.ticket.ticket_id))

    def fail_all(self, error: SplitserveError) -> None:
        """Tell the router that none of its requests will be answered."""
        for request_id in list(self._prefills):
            self._drop(request_id)
            self._tell_failure(request_id, error)

    def _submit(self, request: GenerationRequest) -> None:
        error = self._refusal()
        if request.request_id in self._prefills:
            error = InvalidRequest("a request with this id is running")
        if error is not None:
            self._tell_failure(request.request_id, error)
            return
        seq_id = self._engine.new_sequence_id(request.request_id)
        expire = asyncio.get_running_loop().call_later(request.deadline_s, self._expire, request.request_id)
        prefill = Prefill(request, seq_id, self._clock(), expire)
        self._prefills[request.request_id] = prefill
        self._engine.listen(seq_id, lambda event: self._on_event(prefill, event))
        self._compute(prefill)

    def _compute(self, prefill: Prefill) -> None:
        request = prefill.request
        command = AddSequence(
            prefill.seq_id,
            request.prompt_token_ids,
            request.sampling,
            output_token_ids=request.output_token_ids,
            hold=True,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        try:
            self._engine.post(command)
        except SplitserveError as error:  # the engine ended a moment ago
            self._fail(prefill, error)

    def _on_event(self, prefill: Prefill, event: Event) -> None:
        match event:
            case BlocksAllocated():
                prefill.allocated_s = self._clock()
                prefill.block_ids = event.block_ids
                prefill.tokens_ready = event.num_cached_tokens
            case PrefillProgressed():
                prefill.tokens_ready = event.num_computed
            case TokensSampled():
                self._hand_off(prefill, event)
            case SequenceFailed():
                self._fail(prefill, event.error)

    def _hand_off(self, prefill: Prefill, event: TokensSampled) -> None:
        """Send the first token and, unless it was the last one, the ticket for the KV before it."""
        request = prefill.request
        self._forget(request.request_id)
        receipt = prefill.receipt(self._clock(), event.num_cached_tokens)
        first = TokenDelta(request.request_id, event.tokens, event.finish_reason, receipt)
        self._metrics.observe_prefill(receipt)
        done = self.outbox.pending().done.add(first=delta_to_wire(first))
        if event.finish_reason is None:
            ticket = self._holder.offer(
                request.request_id,
                prefill.seq_id,
                prefill.block_ids,
                num_tokens=len(request.prompt_token_ids) + len(request.output_token_ids),
                tokens_ready=prefill.tokens_ready,
            )
            done.ticket.CopyFrom(ticket_to_wire(ticket))

    def _fail(self, prefill: Prefill, error: SplitserveError) -> None:
        self._forget(prefill.request.request_id)
        self._tell_failure(prefill.request.request_id, error)

    def _abort(self, request_id: RequestId) -> None:
        """The router has no use for the request any more, whether or not its ticket has left."""
        self._drop(request_id)
        self._holder.drop_request(request_id)

    def _expire(self, request_id: RequestId) -> None:
        self._drop(request_id)
        self._tell_failure(request_id, DeadlineExceeded("the deadline passed during the prefill"))

    def _drop(self, request_id: RequestId) -> None:
        prefill = self._forget(request_id)
        if prefill is not None:
            self._engine.post(AbortSequence(prefill.seq_id))

    def _forget(self, request_id: RequestId) -> Prefill | None:
        prefill = self._prefills.pop(request_id, None)
        if prefill is not None:
            prefill.deadline.cancel()
            self._engine.forget(prefill.seq_id)
        return prefill

    def _tell_failure(self, request_id: RequestId, error: SplitserveError) -> None:
        self._metrics.observe_failure(error)
        self.outbox.pending().failures.append(failure_to_wire(request_id, error))

    def _stamp(self, frame: pb.PrefillFrame) -> None:
        frame.load.CopyFrom(load_to_wire(self._engine.stats.load))
