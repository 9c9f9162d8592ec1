"""A prefill and a decode worker, whole, and what a router does with them, by hand.

Real engines (fake executor), real gRPC, loopback transport.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc
from worker_fakes import BLOCK_SIZE, CLUSTER_TOKEN, D0, FINGERPRINT, P0, MemoryDirectory
from worker_stations import Station, profile

from decode_worker import DecodeWorker, DecodeWorkerConfig, OnKvFailure
from engine.fake_executor import FakeExecutor
from kv_transfer import LoopbackNetwork, block_checksums
from prefill_worker import PrefillWorker, PrefillWorkerConfig
from protocol.codec import failure_from_wire, request_to_wire, token_from_wire
from protocol.errors import EngineFault, SplitserveError
from protocol.generation import GenerationRequest, choice_seed
from protocol.handoff import Fingerprint
from protocol.wire import splitserve_pb2 as pb
from protocol.wire.splitserve_pb2_grpc import DecodeWorkerStub, PrefillWorkerStub
from rpc import WorkerSession, open_channel

LIMIT_S = 20.0


class Pair:
    """One prefill and one decode worker and a directory."""

    def __init__(
        self,
        policy: OnKvFailure = OnKvFailure.RECOMPUTE,
        *,
        lease_s: float = 5.0,
        fetch_limit_s: float = 10.0,
        decode_fingerprint: Fingerprint = FINGERPRINT,
        compares_checksums: bool = False,
        **prefill_scheduler: Any,
    ) -> None:
        self.network = LoopbackNetwork()
        self.directory = MemoryDirectory()
        self.p, self.d = Station(P0, self.network, **prefill_scheduler), Station(D0, self.network)
        self.prefill = PrefillWorker(
            profile=profile(P0, FINGERPRINT),
            make_engine=self.p.engine,
            transport=self.p.transport,
            directory=self.directory,
            config=PrefillWorkerConfig(lease_s=lease_s),
            checksum=partial(block_checksums, self.p.memory) if compares_checksums else None,
        )
        self.decode = DecodeWorker(
            profile=profile(D0, decode_fingerprint),
            make_engine=self.d.engine,
            reader=self.d.reader(decode_fingerprint, block_checksums if compares_checksums else None),
            directory=self.directory,
            config=DecodeWorkerConfig(policy, fetch_limit_s=fetch_limit_s, owner_timeout_s=2.0),
        )

    async def until_idle(self) -> None:
        """Both workers have nothing left of any request, and both engines hold no block."""
        await until(lambda: is_idle(self.prefill) and is_idle(self.decode))

    @property
    def prefill_is_idle(self) -> bool:
        return is_idle(self.prefill)

    def assert_no_block_is_lost(self) -> None:
        """To be asked after both have stopped."""
        for station in (self.p, self.d):
            station.core.check_integrity()
            station.core.assert_idle()


def is_idle(worker: PrefillWorker | DecodeWorker) -> bool:
    try:
        worker.assert_idle()
    except EngineFault:
        return False
    return True


async def until(is_true: Any) -> None:
    """Look until it is true; the test fails when it never is."""
    async with asyncio.timeout(LIMIT_S):
        while not is_true():  # noqa: ASYNC110  # nobody signals an idle worker
            await asyncio.sleep(0.005)


class Line:
    """A router's session with one worker: frames by request."""

    def __init__(self, stub: Any, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.answers: dict[str, asyncio.Queue[Any]] = {}
        self.broken: asyncio.Queue[SplitserveError] = asyncio.Queue()
        self.on_credit: Callable[[pb.Credit], Any] = lambda credit: None
        self.session: Any = WorkerSession(
            stub(channel).Serve, self._on_frame, self.broken.put_nowait, time.monotonic
        )

    def _on_frame(self, frame: Any) -> None:
        if hasattr(frame, "credit"):
            self.on_credit(frame.credit)
        for issued in getattr(frame, "tickets", ()):
            self._of(issued.request_id).put_nowait(issued.ticket)
        for done in getattr(frame, "done", ()):
            self._of(done.firsts[0].request_id).put_nowait(done)
        for delta in getattr(frame, "deltas", ()):
            self._of(delta.request_id).put_nowait(delta)
        for failure in frame.failures:
            self._of(failure.request_id).put_nowait(failure_from_wire(failure))

    def _of(self, request_id: str) -> asyncio.Queue[Any]:
        return self.answers.setdefault(request_id, asyncio.Queue())

    async def answer(self, name: str) -> Any:
        """The next answer about a request; its failure is raised."""
        async with asyncio.timeout(LIMIT_S):
            answer = await self._of(name).get()
        if isinstance(answer, SplitserveError):
            raise answer
        return answer


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What comes of a prefill."""

    ticket: Any
    firsts: Any
    prompt_logprobs: Any = ()

    @property
    def num_open(self) -> int:
        """Choices that go on."""
        return sum(not first.finish_reason for first in self.firsts)


class Router:
    """What a router does, by hand."""

    def __init__(self, prefill: Line, decode: Line) -> None:
        self.p, self.d = prefill, decode
        self.last_ticket: Any = None

    async def submit(self, request: GenerationRequest) -> Any:
        """Start a prefill. Returns its ticket."""
        await self.p.session.send(pb.PrefillCommand(submit=request_to_wire(request)))
        self.last_ticket = await self.p.answer(request.request_id)
        return self.last_ticket

    async def prefilled(self, request: GenerationRequest, ticket: Any) -> Prefilled:
        done = await self.p.answer(request.request_id)
        return Prefilled(ticket, done.firsts, done.prompt_logprobs)

    async def prefill(self, request: GenerationRequest) -> Prefilled:
        return await self.prefilled(request, await self.submit(request))

    async def offer(self, request: GenerationRequest, ticket: Any = None) -> None:
        submit = pb.DecodeSubmit(request=request_to_wire(request), ticket=ticket)
        await self.d.session.send(pb.DecodeCommand(submit=submit))

    async def begin(self, request: GenerationRequest, done: Prefilled) -> None:
        begin = pb.Begin(
            request_id=request.request_id,
            first_tokens=[
                pb.FirstToken(index=first.index, token=first.tokens[0])
                for first in done.firsts
                if not first.finish_reason
            ],
        )
        await self.d.session.send(pb.DecodeCommand(begin=begin))

    async def hand_over(self, request: GenerationRequest, done: Prefilled) -> None:
        """All at once, after the prefill."""
        await self.offer(request, done.ticket)
        await self.begin(request, done)

    async def abort(self, request: GenerationRequest) -> None:
        await self.d.session.send(pb.DecodeCommand(abort_request_id=request.request_id))

    async def overlap(self, request: GenerationRequest) -> Prefilled:
        """The ticket at once, the beginning when the prefill is done."""
        ticket = await self.submit(request)
        await self.offer(request, ticket)
        done = await self.prefilled(request, ticket)
        await (self.begin(request, done) if done.num_open else self.abort(request))
        return done

    async def rest(self, name: str) -> tuple[list[int], Any]:
        """All tokens that D sends, and the receipt of its first delta."""
        tokens: list[int] = []
        receipt: Any = None
        while True:
            delta = await self.d.answer(name)
            receipt = receipt or delta.receipt
            tokens += [token_from_wire(t).token_id for t in delta.tokens]
            if delta.finish_reason:
                return tokens, receipt

    async def generate_choices(self, request: GenerationRequest) -> dict[int, list[int]]:
        """All tokens of every choice."""
        done = await self.overlap(request)
        tokens = {first.index: [first.tokens[0].token_id] for first in done.firsts}
        num_open = done.num_open
        while num_open:
            delta = await self.d.answer(request.request_id)
            tokens[delta.index] += [token.token_id for token in delta.tokens]
            num_open -= bool(delta.finish_reason)
        return tokens

    async def generate(self, request: GenerationRequest) -> tuple[list[int], Any]:
        done = await self.overlap(request)
        first = [t.token_id for t in done.firsts[0].tokens]
        if not done.num_open:
            return first, done.firsts[0].receipt
        tokens, receipt = await self.rest(request.request_id)
        return first + tokens, receipt


def oracle(request: GenerationRequest) -> list[int]:
    executor = FakeExecutor(BLOCK_SIZE)
    tokens = [*request.prompt_token_ids, *request.output_token_ids]
    while len(tokens) < len(request.prompt_token_ids) + request.sampling.max_tokens:
        tokens.append(executor.next_token(tokens, request.sampling.seed))
    return tokens[len(request.prompt_token_ids) + len(request.output_token_ids) :]


def choice_of(request: GenerationRequest, index: int) -> GenerationRequest:
    """One choice as the request of one choice that it is."""
    sampling = replace(request.sampling, seed=choice_seed(request.sampling.seed, index))
    return replace(request, n=1, index=index, sampling=sampling)


@asynccontextmanager
async def running(pair: Pair, *, leaks_expected: bool = False) -> AsyncIterator[Router]:
    async with AsyncExitStack() as stack:
        addresses = [await worker.start("127.0.0.1", 0) for worker in (pair.prefill, pair.decode)]
        stack.push_async_callback(pair.prefill.stop)
        stack.push_async_callback(pair.decode.stop)
        lines = []
        for stub, address in zip((PrefillWorkerStub, DecodeWorkerStub), addresses, strict=True):
            channel = await stack.enter_async_context(open_channel(address, CLUSTER_TOKEN))
            lines.append(Line(stub, channel))
            await lines[-1].session.start()
            stack.push_async_callback(lines[-1].session.close)
        yield Router(*lines)
        if not leaks_expected:
            await pair.until_idle()
    assert pair.directory.records == {}
    if not leaks_expected:
        pair.assert_no_block_is_lost()
