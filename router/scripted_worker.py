"""A fake worker that follows a script, and can be paused, killed, or made to fail at any point.

prefill: submit ─> ticket (unless `is_full`) ─> first tokens, HELD ─> taken by a reader, or released
decode:  submit ─> begin ─> (unless `is_reading`) takes the ticket from its owner ─> tokens
         submit without a ticket ─> tokens
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from protocol import codec
from protocol.errors import LeaseExpired, SplitserveError, TransferFailed
from protocol.generation import (
    FinishReason,
    GenerationRequest,
    Receipt,
    Token,
    TokenDelta,
    choice_seed,
)
from protocol.handoff import Ticket
from protocol.ids import BlockId, RequestId, Role, TicketId, WorkerIdentity
from protocol.membership import Load, WorkerRecord
from protocol.wire import splitserve_pb2 as pb

Script = Callable[[GenerationRequest], Sequence[int]]
"""The whole output of a request of one choice as token ids, whatever part of it is there already.

Choice i of a request of several is asked for as the request of one choice that it is: with its own seed.
"""

EOS = -1
"""In a script: the sequence ends here with `stop`; the worker's `eos_id` is the token."""


class ScriptedStream(Protocol):
    """A router's end of a stream."""

    def on_frame(self, frame: Any) -> None: ...

    def broken(self) -> None: ...


class ScriptedWorker:
    """One worker; the other end of a `Connection`. Attributes may be set at any time."""

    def __init__(
        self,
        record: WorkerRecord,
        script: Script,
        eos_id: int,
        find: Callable[[WorkerIdentity], ScriptedWorker | None],
    ) -> None:
        """`find`: any worker, by which a decode worker reaches the owner of a ticket."""
        self.record = record
        self.script = script
        self.eos_id = eos_id
        self._find = find
        self.num_until_pause: int | None = None
        """Tokens that this worker still gives out before it falls silent; None: no limit."""
        self.is_full = False
        """A prefill worker gives out no ticket."""
        self.is_reading = False
        """A decode worker is not done with reading what its tickets name."""
        self.pool_blocks = 1 << 20
        """What a decode worker grants credit of: those that are not taken by its requests."""
        self._resumed = asyncio.Event()
        self.failures: list[SplitserveError] = []
        """The next submits fail with these."""
        self.receipt = Receipt(fetched_bytes=int(record.role is Role.DECODE))
        self.answers_with: Callable[[GenerationRequest], GenerationRequest] = lambda request: request
        """What a prefill takes the request for: a broken worker answers another one."""
        self.num_first_tokens: list[int] = []
        """Choices that each `begin` at a decode worker named."""
        self.exposition = ""
        self.is_alive = True
        self.is_deaf = False
        """Takes too long to carry an operator's command out."""
        self.requests: list[GenerationRequest] = []
        self.aborted: list[RequestId] = []
        self.aborted_choices: list[tuple[RequestId, int]] = []
        self.num_demanded_blocks = 0
        """Of a decode worker, as the router told it."""
        self.invalidated: list[pb.InvalidateCacheRequest] = []
        self.released: list[TicketId] = []
        self.tickets: list[TicketId] = []
        """Tickets given out, or offered here."""
        self.held: dict[TicketId, RequestId] = {}
        """A prefill worker's tickets that nobody has taken or given back."""
        self._streams: list[ScriptedStream] = []
        self._running: dict[RequestId, asyncio.Task[None]] = {}
        self._begun: dict[RequestId, asyncio.Future[dict[int, int]]] = {}
        self._blocks: dict[RequestId, int] = {}
        self._dropped: set[tuple[RequestId, int]] = set()

    @property
    def identity(self) -> WorkerIdentity:
        return self.record.identity

    @property
    def is_prefill(self) -> bool:
        return self.record.role is Role.PREFILL

    @property
    def running(self) -> list[RequestId]:
        """Requests submitted and neither ended nor aborted."""
        return list(self._running)

    def kill(self) -> None:
        """As kill -9: all streams break, nothing more comes; the directory does not know yet."""
        self.is_alive = False
        for request_id in self.running:
            self._drop(request_id)
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.broken()

    def fail_all(self, error: SplitserveError) -> None:
        """Fail all that runs, as at the end of a drain."""
        for request_id in self.running:
            self._fail(request_id, error)

    def resume(self) -> None:
        """End a pause for good."""
        self.num_until_pause = None
        self.is_full = self.is_reading = False
        self._resumed.set()

    def attach(self, stream: ScriptedStream) -> None:
        self._streams.append(stream)
        self._reply(self._frame())

    def detach(self, stream: ScriptedStream) -> None:
        if stream in self._streams:
            self._streams.remove(stream)

    def report(self, load: Load) -> None:
        """Send a frame that carries nothing but a load, and credit."""
        frame = self._frame()
        frame.load.CopyFrom(codec.load_to_wire(load))
        self._reply(frame)

    def take(self, ticket_id: TicketId) -> bool:
        """A reader's question at the end of its reading: whether it may use what it has read."""
        return self.held.pop(ticket_id, None) is not None

    def receive(self, command: Any) -> None:
        if not self.is_alive:
            return
        kind = command.WhichOneof("command")
        if kind == "submit":
            self._submit(command.submit)
        elif kind == "begin":
            self._begin(command.begin)
        elif kind == "abort_request_id":
            self.aborted.append(RequestId(command.abort_request_id))
            self._drop(RequestId(command.abort_request_id))
        elif kind == "abort_choice":
            choice = (RequestId(command.abort_choice.request_id), command.abort_choice.index)
            self.aborted_choices.append(choice)
            self._dropped.add(choice)
        elif kind == "release_ticket_id":
            self.released.append(TicketId(command.release_ticket_id))
            self.held.pop(TicketId(command.release_ticket_id), None)
        elif kind == "demanded_blocks":
            self.num_demanded_blocks = command.demanded_blocks
        else:
            raise AssertionError(f"nobody here knows a {kind}")

    def _submit(self, submit: Any) -> None:
        request = codec.request_from_wire(submit if self.is_prefill else submit.request)
        self.requests.append(request)
        if not self.is_prefill and submit.HasField("ticket"):
            self.tickets.append(TicketId(submit.ticket.ticket_id))
        if self.failures:
            self._fail(request.request_id, self.failures.pop(0))
            return
        begun: asyncio.Future[dict[int, int]] = asyncio.get_running_loop().create_future()
        self._begun[request.request_id] = begun
        work = self._prefill(request) if self.is_prefill else self._decode(request, submit, begun)
        self._blocks[request.request_id] = request.num_blocks(self.record.fingerprint.block_size)
        self._running[request.request_id] = asyncio.create_task(work)

    def _begin(self, begin: Any) -> None:
        self.num_first_tokens.append(len(begin.first_tokens))
        begun = self._begun.get(RequestId(begin.request_id))
        if begun is not None:
            begun.set_result({first.index: first.token.token_id for first in begin.first_tokens})

    def _ended(self, request_id: RequestId) -> asyncio.Task[None] | None:
        self._blocks.pop(request_id, None)
        self._begun.pop(request_id, None)
        return self._running.pop(request_id, None)

    def _drop(self, request_id: RequestId) -> None:
        """Of a request that was computed, or held, nothing stays."""
        if (task := self._ended(request_id)) is not None:
            task.cancel()
        self.held = {ticket: owner for ticket, owner in self.held.items() if owner != request_id}

    def _fail(self, request_id: RequestId, error: SplitserveError) -> None:
        self._drop(request_id)
        frame = self._frame()
        frame.failures.append(codec.failure_to_wire(request_id, error))
        self._reply(frame)

    async def _prefill(self, request: GenerationRequest) -> None:
        at, answered = len(request.output_token_ids), self.answers_with(request)
        await asyncio.sleep(0)
        while self.is_full:
            await self._resumed.wait()
        ticket = self._ticket(request)
        self.tickets.append(ticket.ticket_id)
        self.held[ticket.ticket_id] = request.request_id
        issued = pb.TicketIssued(request_id=request.request_id, ticket=codec.ticket_to_wire(ticket))
        self._reply(pb.PrefillFrame(tickets=[issued]))
        await self._turn()
        firsts = [self._delta(choice, at) for choice in _choices(answered)]
        done = pb.PrefillDone(firsts=map(codec.delta_to_wire, firsts))
        if (number := request.sampling.prompt_logprobs) is not None:
            done.prompt_logprobs.extend(
                codec.token_to_wire(Token(token_id, -0.25, ((token_id, -0.25), (0, -2.0))[:number]))
                for token_id in answered.prompt_token_ids[1:]
            )
        if all(first.finish_reason is not None for first in firsts):
            del self.held[ticket.ticket_id]
        self._ended(request.request_id)
        self._reply(pb.PrefillFrame(done=[done]))

    def _ticket(self, request: GenerationRequest) -> Ticket:
        return Ticket(
            TicketId(f"ticket-{request.request_id}-{self.identity}"),
            self.identity,
            self.record.address,
            (BlockId(1),),
            request.num_tokens,
            0,
            lease_s=10.0,
        )

    async def _decode(
        self, request: GenerationRequest, submit: Any, begun: asyncio.Future[dict[int, int]]
    ) -> None:
        at = len(request.output_token_ids)
        choices = _choices(request)
        receipt = self.receipt
        if submit.HasField("ticket"):
            firsts = await begun
            while self.is_reading:
                await self._resumed.wait()
            error = self._take_from_owner(submit.ticket)
            if error is not None:
                self._fail(request.request_id, error)
                return
            choices = [choice for choice in choices if choice.index in firsts]
            for choice in choices:
                given, expected = firsts[choice.index], self._token(choice, at)
                assert given == expected, f"token {at} is {given}, not {expected}"  # noqa: S101
            at += 1
        else:
            receipt = replace(receipt, fetched_bytes=0)
        await self._generate(request, choices, at, receipt)

    def _take_from_owner(self, ticket: Any) -> SplitserveError | None:
        owner = self._find(codec.identity_from_wire(ticket.owner))
        if owner is None or not owner.is_alive:
            return TransferFailed("the owner of the ticket does not answer")
        is_valid = owner.take(TicketId(ticket.ticket_id))
        return None if is_valid else LeaseExpired("the owner has given the ticket up")

    async def _generate(
        self, request: GenerationRequest, choices: list[GenerationRequest], at: int, receipt: Receipt
    ) -> None:
        """The choices' tokens from number `at` on, one of each per step."""
        while choices:
            await self._turn()
            wanted = [c for c in choices if (request.request_id, c.index) not in self._dropped]
            deltas = [replace(self._delta(choice, at), receipt=receipt) for choice in wanted]
            ended = {delta.index for delta in deltas if delta.finish_reason is not None}
            choices = [choice for choice in wanted if choice.index not in ended]
            if not choices:
                self._ended(request.request_id)
            self._reply(pb.DecodeFrame(deltas=map(codec.delta_to_wire, deltas)))
            at += 1

    async def _turn(self) -> None:
        """Return in the next turn of the loop; never when the worker is paused."""
        await asyncio.sleep(0)
        if self.num_until_pause is not None:
            if self.num_until_pause == 0:
                await self._resumed.wait()
            else:
                self.num_until_pause -= 1

    def _delta(self, choice: GenerationRequest, at: int) -> TokenDelta:
        """Output token number `at` of a choice."""
        token_id = self._token(choice, at)
        logprob: float | None = None
        best: tuple[tuple[int, float], ...] = ()
        if choice.sampling.logprobs is not None:
            logprob, best = -0.5, ((token_id, -0.5),) * min(choice.sampling.logprobs, 1)
        reason = None
        if self.script(choice)[at] == EOS:
            reason = FinishReason.STOP
        elif at + 1 >= choice.sampling.max_tokens:
            reason = FinishReason.LENGTH
        token = Token(token_id, logprob, best)
        return TokenDelta(choice.request_id, (token,), reason, self.receipt, choice.index)

    def _token(self, request: GenerationRequest, at: int) -> int:
        token_id = self.script(request)[at]
        return self.eos_id if token_id == EOS else token_id

    def _frame(self) -> Any:
        return pb.PrefillFrame() if self.is_prefill else pb.DecodeFrame()

    def _reply(self, frame: Any) -> None:
        if isinstance(frame, pb.DecodeFrame):
            frame.credit.blocks = max(0, self.pool_blocks - sum(self._blocks.values()))
        for stream in list(self._streams):
            stream.on_frame(frame)


def _choices(request: GenerationRequest) -> list[GenerationRequest]:
    """Each choice as the request of one choice that it is."""
    if request.n == 1:
        return [request]
    seed = request.sampling.seed
    return [
        replace(request, n=1, index=i, sampling=replace(request.sampling, seed=choice_seed(seed, i)))
        for i in range(request.n)
    ]
