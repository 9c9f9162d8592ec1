"""Frames meet the requests that wait for them, in every order in which answers and aborts can cross."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from virtual_time import settle, virtual_time

from protocol import codec
from protocol.errors import InvalidRequest, WorkerUnavailable
from protocol.generation import FinishReason, GenerationRequest, SamplingParams, Token, TokenDelta
from protocol.handoff import Ticket
from protocol.ids import BlockId, RequestId, TicketId, WorkerId, WorkerIdentity
from protocol.membership import Load
from protocol.wire import splitserve_pb2 as pb
from router.links import DecodeLink, PrefillLink, lost

REQUEST = GenerationRequest(RequestId("r"), (1, 2), SamplingParams(max_tokens=4))
TICKET = Ticket(TicketId("t"), WorkerIdentity(WorkerId("p"), "i"), "host:1", (BlockId(1),), 2, 2, 10.0)


def first(finish_reason: FinishReason | None = None, num_tokens: int = 1) -> Any:
    return codec.delta_to_wire(TokenDelta(REQUEST.request_id, (Token(7),) * num_tokens, finish_reason))


def done() -> pb.PrefillFrame:
    return pb.PrefillFrame(done=[pb.PrefillDone(first=first(), ticket=codec.ticket_to_wire(TICKET))])


def prefill_link() -> tuple[PrefillLink, list[str]]:
    sent: list[str] = []
    link = PrefillLink(lambda command: sent.append(command.WhichOneof("command")))
    link.on_frame(pb.PrefillFrame())
    return link, sent


@virtual_time
async def test_prefill_gets_its_answer() -> None:
    link, sent = prefill_link()
    task = asyncio.create_task(link.prefill(REQUEST))
    await settle()
    link.on_frame(done())
    answer = await task
    assert answer.ticket == TICKET
    assert answer.first.tokens == (Token(7),)
    assert sent == ["submit"]
    link.assert_idle()


@virtual_time
async def test_cancelled_prefill_is_aborted_and_a_late_ticket_is_released() -> None:
    link, sent = prefill_link()
    task = asyncio.create_task(link.prefill(REQUEST))
    await settle()
    task.cancel()
    await settle()
    assert sent == ["submit", "abort_request_id"]
    link.on_frame(done())
    assert sent == ["submit", "abort_request_id", "release_ticket_id"]
    link.assert_idle()


@pytest.mark.parametrize("answer_first", [True, False])
def test_ticket_is_released_when_answer_and_cancellation_meet_in_one_turn(answer_first: bool) -> None:
    @virtual_time
    async def scenario() -> None:
        link, sent = prefill_link()
        task = asyncio.create_task(link.prefill(REQUEST))
        await settle()
        if answer_first:
            link.on_frame(done())
            task.cancel()
        else:
            task.cancel()
            link.on_frame(done())
        await settle()
        assert task.cancelled()
        assert sent[-1] == "release_ticket_id" or sent[-2:] == ["release_ticket_id", "abort_request_id"]
        link.assert_idle()

    scenario()


@virtual_time
async def test_failure_reaches_the_one_that_it_is_for() -> None:
    link, _ = prefill_link()
    task = asyncio.create_task(link.prefill(REQUEST))
    await settle()
    link.on_frame(
        pb.PrefillFrame(
            failures=[
                codec.failure_to_wire(RequestId("another"), InvalidRequest("x")),
                codec.failure_to_wire(REQUEST.request_id, InvalidRequest("too long", param="prompt")),
            ]
        )
    )
    with pytest.raises(InvalidRequest, match="too long") as caught:
        await task
    assert caught.value.param == "prompt"


@virtual_time
async def test_broken_stream_fails_all_and_the_next_one_serves_again() -> None:
    link, sent = prefill_link()
    task = asyncio.create_task(link.prefill(REQUEST))
    await settle()
    link.on_broken(lost("p"))
    with pytest.raises(WorkerUnavailable):
        await task
    with pytest.raises(WorkerUnavailable):
        await link.prefill(REQUEST)
    link.release(TICKET.ticket_id)
    assert sent == ["submit"]
    load = link.on_frame(pb.PrefillFrame(load=codec.load_to_wire(Load(num_running=3))))
    assert load == Load(num_running=3)
    assert link.is_up


@pytest.mark.parametrize(
    "wire",
    [
        pb.PrefillDone(first=first()),
        pb.PrefillDone(first=first(FinishReason.STOP), ticket=codec.ticket_to_wire(TICKET)),
        pb.PrefillDone(first=first(num_tokens=2), ticket=codec.ticket_to_wire(TICKET)),
        pb.PrefillDone(first=first(num_tokens=0, finish_reason=FinishReason.STOP)),
    ],
)
def test_answer_that_makes_no_sense_is_refused(wire: pb.PrefillDone) -> None:
    link, _ = prefill_link()
    with pytest.raises(ValueError, match="one token"):
        link.on_frame(pb.PrefillFrame(done=[wire]))


def decode_link() -> tuple[DecodeLink, list[str]]:
    sent: list[str] = []
    link = DecodeLink(lambda command: sent.append(command.WhichOneof("command")))
    link.on_frame(pb.DecodeFrame())
    return link, sent


def delta(token_id: int, finish_reason: FinishReason | None = None) -> pb.DecodeFrame:
    wire = codec.delta_to_wire(TokenDelta(REQUEST.request_id, (Token(token_id),), finish_reason))
    return pb.DecodeFrame(deltas=[wire])


@virtual_time
async def test_deltas_that_came_before_the_break_are_given_first() -> None:
    link, sent = decode_link()
    stream = link.decode(REQUEST, TICKET, Token(7))
    link.on_frame(delta(8))
    link.on_frame(delta(9))
    link.on_broken(lost("d"))
    assert [(await stream.next()).tokens[0].token_id for _ in range(2)] == [8, 9]
    with pytest.raises(WorkerUnavailable):
        await stream.next()
    stream.close()
    assert sent == ["submit"]
    with pytest.raises(WorkerUnavailable):
        link.decode(REQUEST, TICKET, Token(7))


@virtual_time
async def test_closing_aborts_once_and_only_what_runs() -> None:
    link, sent = decode_link()
    stream = link.decode(REQUEST, TICKET, Token(7))
    link.on_frame(delta(8))
    stream.close()
    stream.close()
    link.on_frame(delta(9))  # was on its way
    assert sent == ["submit", "abort_request_id"]
    finished = link.decode(REQUEST, TICKET, Token(7))
    link.on_frame(delta(8, FinishReason.LENGTH))
    finished.close()
    assert sent == ["submit", "abort_request_id", "submit"]
    assert (await finished.next()).finish_reason is FinishReason.LENGTH
    link.assert_idle()


@virtual_time
async def test_waiting_reader_wakes_up_for_delta_and_failure() -> None:
    link, _ = decode_link()
    stream = link.decode(REQUEST, TICKET, Token(7))
    waiting = asyncio.create_task(stream.next())
    await settle()
    link.on_frame(delta(8))
    assert (await waiting).tokens == (Token(8),)
    waiting = asyncio.create_task(stream.next())
    await settle()
    link.on_frame(
        pb.DecodeFrame(failures=[codec.failure_to_wire(REQUEST.request_id, InvalidRequest("no"))])
    )
    with pytest.raises(InvalidRequest):
        await waiting
