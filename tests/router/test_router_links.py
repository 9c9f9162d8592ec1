"""Frames meet the requests that wait for them, in every order in which answers and aborts can cross."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from virtual_time import settle, virtual_time

from protocol import codec
from protocol.errors import EngineFault, InvalidRequest, SplitserveError, WorkerUnavailable
from protocol.generation import FinishReason, GenerationRequest, SamplingParams, Token, TokenDelta
from protocol.handoff import Ticket
from protocol.ids import BlockId, RequestId, TicketId, WorkerId, WorkerIdentity
from protocol.wire import splitserve_pb2 as pb
from router.credit import CreditAccount
from router.decode_link import DecodeLink, LinkStream
from router.prefill_link import PrefillLink, lost

REQUEST = GenerationRequest(RequestId("r"), (1, 2), SamplingParams(max_tokens=4))
TICKET = Ticket(TicketId("t"), WorkerIdentity(WorkerId("p"), "i"), "host:1", (BlockId(1),), 2, 2, 10.0)


def first(finish_reason: FinishReason | None = None, num_tokens: int = 1) -> Any:
    return codec.delta_to_wire(TokenDelta(REQUEST.request_id, (Token(7),) * num_tokens, finish_reason))


def issued() -> pb.PrefillFrame:
    ticket = pb.TicketIssued(request_id=REQUEST.request_id, ticket=codec.ticket_to_wire(TICKET))
    return pb.PrefillFrame(tickets=[ticket])


def done(finish_reason: FinishReason | None = None) -> pb.PrefillFrame:
    return pb.PrefillFrame(done=[pb.PrefillDone(firsts=[first(finish_reason)])])


def failed(error: SplitserveError, request_id: RequestId = REQUEST.request_id) -> pb.Failure:
    return codec.failure_to_wire(request_id, error)


def prefill_link() -> tuple[PrefillLink, list[str]]:
    sent: list[str] = []
    link = PrefillLink(lambda command: sent.append(command.WhichOneof("command")))
    link.on_frame(pb.PrefillFrame())
    return link, sent


@virtual_time
async def test_ticket_comes_before_the_first_tokens() -> None:
    link, sent = prefill_link()
    run = link.prefill(REQUEST)
    waiting = asyncio.create_task(run.ticket())
    await settle()
    link.on_frame(issued())
    assert await waiting == TICKET
    waiting_for_end = asyncio.create_task(run.done())
    await settle()
    assert not waiting_for_end.done()
    link.on_frame(done())
    assert (await waiting_for_end).open_choices == [(0, Token(7))]
    run.taken()
    run.close()
    assert sent == ["submit"]
    link.assert_idle()


@virtual_time
async def test_ticket_and_end_of_one_frame_are_both_given() -> None:
    link, _ = prefill_link()
    run = link.prefill(REQUEST)
    frame = issued()
    frame.MergeFrom(done())
    link.on_frame(frame)
    assert await run.ticket() == TICKET
    assert (await run.done()).firsts[0].tokens == (Token(7),)
    run.close()


STATES = {
    "queued": ([], ["abort_request_id"]),
    "computed": ([issued()], ["abort_request_id", "release_ticket_id"]),
    "held": ([issued(), done()], ["release_ticket_id"]),
    "all ended": ([issued(), done(FinishReason.STOP)], []),
    "failed": ([issued(), pb.PrefillFrame(failures=[failed(InvalidRequest("x"))])], []),
}


@pytest.mark.parametrize("state", STATES)
def test_closing_gives_back_what_the_worker_still_has(state: str) -> None:
    @virtual_time
    async def scenario() -> None:
        frames, expected = STATES[state]
        link, sent = prefill_link()
        run = link.prefill(REQUEST)
        for frame in frames:
            link.on_frame(frame)
        run.close()
        run.close()
        assert sent == ["submit", *expected]
        link.assert_idle()

    scenario()


@virtual_time
async def test_ticket_and_end_that_cross_an_abort_leave_nothing_held() -> None:
    link, sent = prefill_link()
    link.prefill(REQUEST).close()
    link.on_frame(issued())
    link.on_frame(done())
    assert sent == ["submit", "abort_request_id", "release_ticket_id"]
    link.assert_idle()


@virtual_time
async def test_failure_reaches_the_one_that_it_is_for() -> None:
    link, _ = prefill_link()
    run = link.prefill(REQUEST)
    task = asyncio.create_task(run.ticket())
    await settle()
    own = failed(InvalidRequest("too long", param="prompt"))
    link.on_frame(pb.PrefillFrame(failures=[failed(InvalidRequest("x"), RequestId("another")), own]))
    with pytest.raises(InvalidRequest, match="too long") as caught:
        await task
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest):
        await run.done()


@virtual_time
async def test_broken_stream_fails_all_and_the_next_one_serves_again() -> None:
    link, sent = prefill_link()
    run = link.prefill(REQUEST)
    link.on_frame(issued())
    link.on_broken(lost("p"))
    assert await run.ticket() == TICKET
    with pytest.raises(WorkerUnavailable):
        await run.done()
    run.close()
    with pytest.raises(WorkerUnavailable):
        link.prefill(REQUEST)
    assert sent == ["submit"]
    link.on_frame(pb.PrefillFrame())
    assert link.is_up


@pytest.mark.parametrize(
    "wire",
    [
        pb.PrefillDone(),
        pb.PrefillDone(firsts=[first(num_tokens=2)]),
        pb.PrefillDone(firsts=[first(num_tokens=0, finish_reason=FinishReason.STOP)]),
    ],
)
def test_end_that_makes_no_sense_is_refused(wire: pb.PrefillDone) -> None:
    link, _ = prefill_link()
    with pytest.raises(ValueError, match="one token per choice"):
        link.on_frame(pb.PrefillFrame(done=[wire]))


@virtual_time
async def test_second_ticket_is_refused() -> None:
    link, _ = prefill_link()
    link.prefill(REQUEST)
    link.on_frame(issued())
    with pytest.raises(ValueError, match="one ticket"):
        link.on_frame(issued())


@virtual_time
async def test_end_without_a_ticket_is_not_believed() -> None:
    link, _ = prefill_link()
    run = link.prefill(REQUEST)
    link.on_frame(done())
    with pytest.raises(EngineFault, match="before a ticket"):
        await run.done()


def decode_link() -> tuple[DecodeLink, list[str]]:
    sent: list[str] = []
    link = DecodeLink(lambda command: sent.append(command.WhichOneof("command")), CreditAccount())
    link.on_frame(pb.DecodeFrame(credit=pb.Credit(blocks=9)))
    return link, sent


def submitted(link: DecodeLink, ticket: Ticket | None = None) -> LinkStream:
    return link.decode(REQUEST, ticket, link.credit.reserve(1))


def delta(token_id: int, finish_reason: FinishReason | None = None) -> pb.DecodeFrame:
    wire = codec.delta_to_wire(TokenDelta(REQUEST.request_id, (Token(token_id),), finish_reason))
    return pb.DecodeFrame(deltas=[wire])


@virtual_time
async def test_stream_with_a_ticket_begins_when_the_first_tokens_are_there() -> None:
    commands: list[pb.DecodeCommand] = []
    link = DecodeLink(commands.append, CreditAccount())
    link.on_frame(pb.DecodeFrame())
    stream = submitted(link, TICKET)
    assert commands[0].submit.ticket.ticket_id == "t"
    with pytest.raises(ValueError, match="before the first tokens"):
        link.on_frame(delta(8))
    stream.begin([(0, Token(7))])
    assert [(f.index, f.token.token_id) for f in commands[1].begin.first_tokens] == [(0, 7)]
    link.on_frame(delta(8, FinishReason.LENGTH))
    assert (await stream.next()).tokens == (Token(8),)


@virtual_time
async def test_stream_without_a_ticket_has_all_tokens_as_deltas() -> None:
    commands: list[pb.DecodeCommand] = []
    link = DecodeLink(commands.append, CreditAccount())
    link.on_frame(pb.DecodeFrame())
    stream = submitted(link)
    assert not commands[0].submit.HasField("ticket")
    link.on_frame(delta(8, FinishReason.LENGTH))
    assert (await stream.next()).tokens == (Token(8),)


@virtual_time
async def test_nothing_is_told_to_a_worker_that_has_failed_the_request() -> None:
    link, sent = decode_link()
    stream = submitted(link, TICKET)
    link.on_frame(pb.DecodeFrame(failures=[failed(InvalidRequest("no"))]))
    stream.begin([(0, Token(7))])
    stream.drop(0)
    stream.close()
    assert sent == ["submit"]


@virtual_time
async def test_grants_count_what_was_submitted_on_this_stream() -> None:
    link, _ = decode_link()
    link.decode(REQUEST, None, link.credit.reserve(4))
    assert link.credit.num_available == 5
    link.on_frame(pb.DecodeFrame(credit=pb.Credit(blocks=5, num_submissions=1)))
    assert link.credit.num_available == 5
    link.on_broken(lost("d"))
    assert link.credit.num_available == 0
    link.on_frame(pb.DecodeFrame(credit=pb.Credit(blocks=9)))
    assert link.credit.num_available == 9


@virtual_time
async def test_deltas_that_came_before_the_break_are_given_first() -> None:
    link, sent = decode_link()
    stream = submitted(link)
    link.on_frame(delta(8))
    link.on_frame(delta(9))
    link.on_broken(lost("d"))
    assert [(await stream.next()).tokens[0].token_id for _ in range(2)] == [8, 9]
    with pytest.raises(WorkerUnavailable):
        await stream.next()
    stream.close()
    assert sent == ["submit"]
    with pytest.raises(WorkerUnavailable):
        submitted(link)


@virtual_time
async def test_closing_aborts_once_and_only_what_runs() -> None:
    link, sent = decode_link()
    stream = submitted(link)
    link.on_frame(delta(8))
    stream.close()
    stream.close()
    link.on_frame(delta(9))  # was on its way
    assert sent == ["submit", "abort_request_id"]
    finished = submitted(link)
    link.on_frame(delta(8, FinishReason.LENGTH))
    finished.close()
    assert sent == ["submit", "abort_request_id", "submit"]
    assert (await finished.next()).finish_reason is FinishReason.LENGTH
    assert finished.choices == set()


@virtual_time
async def test_waiting_reader_wakes_up_for_delta_and_failure() -> None:
    link, _ = decode_link()
    stream = submitted(link)
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


def test_worker_hears_how_many_of_its_blocks_are_waited_for_when_that_changes() -> None:
    sent: list[int] = []
    link = DecodeLink(lambda command: sent.append(command.demanded_blocks), CreditAccount())
    link.demand(3)  # nobody listens yet
    link.on_frame(pb.DecodeFrame())
    for num_blocks in (0, 3, 3, 5, 0):
        link.demand(num_blocks)
    assert sent == [3, 5, 0]
    link.demand(4)
    link.on_broken(lost("the decode worker"))
    link.on_frame(pb.DecodeFrame())
    link.demand(4)  # the worker forgot it with the stream
    assert sent == [3, 5, 0, 4, 4]
