"""What does a prefill worker do for one router? It runs prompts and hands tickets out.

Life of one request here:

    submit ──> queued ──blocks──> computing ──first tokens──> PrefillDone + ticket (blocks HELD)
                  │                   │              \\──all finished──> PrefillDone, nothing held
                  └──── abort, deadline, session end, fault ──> dropped from the engine

A request with several choices is one prefill: one sequence, one first token per choice, one ticket.
The end of the session drops what was not handed out. A ticket that left lives on until its lease ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from engine import (
    AbortSequence,
    AddSequence,
    BlocksAllocated,
    Command,
    Event,
    PrefillProgressed,
    PromptScored,
    SequenceFailed,
    TokensSampled,
)
from prefill_worker.holder import Holder
from prefill_worker.metrics import PrefillMetrics
from protocol.codec import (
    failure_to_wire,
    load_to_wire,
    request_from_wire,
    ticket_to_wire,
    token_to_wire,
    write_delta,
)
from protocol.errors import DeadlineExceeded, InvalidRequest, SplitserveError
from protocol.generation import GenerationRequest, Receipt, Token, TokenDelta
from protocol.handoff import Ticket
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
    prompt_logprobs: list[Token] = field(default_factory=list)
    firsts: list[TokensSampled] = field(default_factory=list)
    """One per choice once the prompt is computed."""

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is handed out."""
        return len(self.request.prompt_token_ids) + len(self.request.output_token_ids)

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
            index=request.index,
            num_samples=request.n,
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
            case PromptScored():
                prefill.prompt_logprobs.extend(event.tokens)
            case TokensSampled():
                prefill.firsts.append(event)
                if len(prefill.firsts) == prefill.request.n:
                    self._hand_off(prefill)
            case SequenceFailed():
                self._fail(prefill, event.error)

    def _hand_off(self, prefill: Prefill) -> None:
        """Send the first tokens and, unless they were all last ones, the ticket for the KV before them."""
        self._forget(prefill.request.request_id)
        receipt = prefill.receipt(self._clock(), prefill.firsts[0].num_cached_tokens)
        self._metrics.observe_prefill(receipt)
        done = self.outbox.pending().done.add(
            prompt_logprobs=[token_to_wire(token) for token in prefill.prompt_logprobs]
        )
        for event in sorted(prefill.firsts, key=lambda event: event.index):
            delta = TokenDelta(
                prefill.request.request_id, event.tokens, event.finish_reason, receipt, event.index
            )
            write_delta(delta, done.firsts.add())
        if any(event.finish_reason is None for event in prefill.firsts):
            done.ticket.CopyFrom(ticket_to_wire(self._offer(prefill)))

    def _offer(self, prefill: Prefill) -> Ticket:
        return self._holder.offer(
            prefill.request.request_id,
            prefill.seq_id,
            prefill.block_ids,
            num_tokens=prefill.num_tokens,
            tokens_ready=prefill.tokens_ready,
        )

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
