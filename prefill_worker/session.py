"""What does a prefill worker do for one router? It runs prompts and hands tickets out.

Life of one request here:

    submit ──> queued ──blocks──> computing, ticket out ──first tokens──> PrefillDone, HELD
                 │                   │                        \\──all finished──> PrefillDone, dropped
                 │                   ├── its reader gave up, its KV became stale ──> failure
                 └───────────────────┴── abort, deadline, session end, fault ──> dropped from the engine

A request with several choices is one prefill: one sequence, one first token per choice, one ticket.
The end of the session drops what is still being computed, with its tickets. A ticket whose prefill is done
lives on until its lease ends.
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
from protocol.errors import (
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    LeaseExpired,
    SplitserveError,
    WorkerUnavailable,
)
from protocol.generation import GenerationRequest, Receipt, Token, TokenDelta
from protocol.ids import RequestId, SequenceId, TicketId
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
    ticket_id: TicketId | None = None
    """None until the blocks are allocated."""
    tokens_ready: int = 0
    prompt_logprobs: list[Token] = field(default_factory=list)
    firsts: list[TokensSampled] = field(default_factory=list)
    """One per choice once the prompt is computed."""

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is handed out."""
        return self.request.num_tokens

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
            self._release(TicketId(command.release_ticket_id))

    def end(self) -> None:
        """Drop what is being computed, and what the router was not told of. Idempotent."""
        for request_id in list(self._prefills):
            self._abort(request_id)
        for frame in self.outbox.unsent():
            for done in frame.done:
                self._holder.drop_request(RequestId(done.firsts[0].request_id))

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
            case BlocksAllocated() if prefill.ticket_id is None:
                self._issue_ticket(prefill, event)
            case BlocksAllocated():
                # It starts over, in other blocks: the cache was told to forget what it had computed.
                self._fail(prefill, WorkerUnavailable("the KV became stale during the prefill"))
            case PrefillProgressed():
                self._progress(prefill, event.num_computed)
            case PromptScored():
                prefill.prompt_logprobs.extend(event.tokens)
            case TokensSampled():
                prefill.firsts.append(event)
                if len(prefill.firsts) == prefill.request.n:
                    self._finish(prefill)
            case SequenceFailed():
                self._fail(prefill, event.error)

    def _issue_ticket(self, prefill: Prefill, allocated: BlocksAllocated) -> None:
        """Tell the router where the KV will be, so that its reader need not wait for the last of it."""
        prefill.allocated_s = self._clock()
        prefill.tokens_ready = allocated.num_cached_tokens
        ticket = self._holder.offer(
            prefill.request.request_id,
            prefill.seq_id,
            allocated.block_ids,
            num_tokens=prefill.num_tokens,
            tokens_ready=prefill.tokens_ready,
            on_end=lambda: self._on_ticket_end(prefill),
        )
        prefill.ticket_id = ticket.ticket_id
        self.outbox.pending().tickets.add(
            request_id=prefill.request.request_id, ticket=ticket_to_wire(ticket)
        )

    def _progress(self, prefill: Prefill, num_computed: int) -> None:
        """The last tokens become readable with the first sampled ones, see `_finish`: a reader that has
        all may release the sequence, which must not end it before it has sampled."""
        prefill.tokens_ready = num_computed
        if prefill.ticket_id is not None and num_computed < prefill.num_tokens:
            self._holder.progress(prefill.ticket_id, num_computed)

    def _finish(self, prefill: Prefill) -> None:
        """Send the first tokens, and unless they were all last ones, hold the KV for its reader."""
        goes_on = any(event.finish_reason is None for event in prefill.firsts)
        if goes_on and (prefill.ticket_id is None or prefill.tokens_ready != prefill.num_tokens):
            raise EngineFault(
                f"a first token came when {prefill.tokens_ready} of {prefill.num_tokens} tokens were ready"
            )
        self._forget(prefill.request.request_id)
        self._tell_done(prefill)
        if prefill.ticket_id is None:
            return
        if goes_on:
            self._holder.progress(prefill.ticket_id, prefill.num_tokens)
        else:
            self._holder.drop(prefill.ticket_id)

    def _tell_done(self, prefill: Prefill) -> None:
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

    def _fail(self, prefill: Prefill, error: SplitserveError) -> None:
        """Of a sequence that is gone already, or goes with its ticket."""
        self._forget(prefill.request.request_id)
        if prefill.ticket_id is not None:
            self._holder.drop(prefill.ticket_id)
        self._tell_failure(prefill.request.request_id, error)

    def _abort(self, request_id: RequestId) -> None:
        """The router has no use for the request any more, whether or not its prefill is done."""
        self._drop(request_id)
        self._holder.drop_request(request_id)

    def _release(self, ticket_id: TicketId) -> None:
        """The router has no use for the ticket any more."""
        for prefill in list(self._prefills.values()):
            if prefill.ticket_id == ticket_id:
                self._drop(prefill.request.request_id)
        self._holder.drop(ticket_id)

    def _expire(self, request_id: RequestId) -> None:
        self._drop(request_id)
        self._tell_failure(request_id, DeadlineExceeded("the deadline passed during the prefill"))

    def _on_ticket_end(self, prefill: Prefill) -> None:
        """Not by this session, if the request is still here: then its sequence was taken away."""
        if self._prefills.get(prefill.request.request_id) is prefill:
            self._fail(prefill, LeaseExpired("the ticket was given up before the prefill was done"))

    def _drop(self, request_id: RequestId) -> None:
        """Forget a request that is being computed, and take its sequence out of the engine."""
        prefill = self._forget(request_id)
        if prefill is None:
            return
        if prefill.ticket_id is None:
            self._engine.post(AbortSequence(prefill.seq_id))
        else:
            self._holder.drop(prefill.ticket_id)

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
        frame.load.CopyFrom(load_to_wire(self._engine.load))
