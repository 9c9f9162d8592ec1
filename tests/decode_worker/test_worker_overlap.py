"""Two whole workers: overlapped reads, tickets for two readers, prompts computed at D, drains.

Each test ends with both engines and all pools idle.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from pair_kit import LIMIT_S, Line, Pair, Router, choice_of, oracle, running, until
from worker_fakes import BLOCK_SIZE, make_request

from decode_worker import OnKvFailure
from kv_transfer import FaultKind
from protocol.errors import SplitserveError, TransferFailed, WorkerUnavailable
from protocol.generation import GenerationRequest
from protocol.wire import splitserve_pb2 as pb
from protocol.wire.splitserve_pb2_grpc import DecodeWorkerStub

NUM_PROMPT = 90
BLOCK_BYTES = BLOCK_SIZE * 8


def pair_with_chunks(policy: OnKvFailure = OnKvFailure.RECOMPUTE) -> Pair:
    """P computes a long prompt in chunks of four blocks."""
    return Pair(policy, max_num_batched_tokens=4 * BLOCK_SIZE, max_num_seqs=8)


def long_request(name: str = "r") -> GenerationRequest:
    return make_request(name, NUM_PROMPT)


def num_written_blocks(pair: Pair) -> int:
    """Blocks of D's pool that anything was read into."""
    memory = pair.d.memory
    return sum(any(memory.block_view(block)) for block in range(1, memory.num_blocks))


async def test_chunks_arrive_before_the_prefill_is_done_and_no_token_differs() -> None:
    pair = pair_with_chunks()
    pair.p.gate_s = 0.2
    async with running(pair) as router:
        request = long_request()
        ticket = await router.submit(request)
        await router.offer(request, ticket)
        await until(lambda: num_written_blocks(pair) >= 4)
        assert router.p.answers["r"].empty(), "the prefill is not done"
        pair.p.gate_s = 0.0
        done = await router.prefilled(request, ticket)
        await router.begin(request, done)
        tokens, receipt = await router.rest("r")
        assert tokens == oracle(request)[1:]
        assert receipt.fetched_bytes == -(-NUM_PROMPT // BLOCK_SIZE) * BLOCK_BYTES
        assert pair.d.read_faults.num_reads > 1


async def test_many_overlapped_hand_offs_at_once_change_no_token() -> None:
    pair = pair_with_chunks()
    async with running(pair) as router:
        requests = [make_request(f"r{i}", num_prompt=7 + 9 * i) for i in range(10)]
        results = await asyncio.gather(*map(router.generate, requests))
        assert [tokens for tokens, _ in results] == list(map(oracle, requests))


@pytest.mark.parametrize("number", [1, 3, 6])
def test_any_chunk_that_fails_is_made_up_for(number: int) -> None:
    async def run() -> None:
        pair = pair_with_chunks()
        for _ in range(number - 1):
            pair.d.read_faults.script(None)
        pair.d.read_faults.script(FaultKind.FAIL)
        async with running(pair) as router:
            tokens, _ = await router.generate(long_request())
            assert tokens == oracle(long_request())

    asyncio.run(run())


async def second_line(router: Router) -> Router:
    """The router after its session with D broke: a new one."""
    line = Line(DecodeWorkerStub, router.d.channel)
    await line.session.start()
    return Router(router.p, line)


@pytest.mark.parametrize("is_done", [False, True])
async def test_ticket_whose_first_reader_vanished_is_read_by_a_second_one(is_done: bool) -> None:
    """It died in its read, while the prefill ran or after it; the owner keeps the blocks for the next."""
    pair = pair_with_chunks(OnKvFailure.FAIL)
    pair.p.gate_s = 0.0 if is_done else 0.05
    pair.d.read_faults.script(FaultKind.STALL)
    async with running(pair) as router:
        request = long_request()
        ticket = await router.submit(request)
        if is_done:
            done = await router.prefilled(request, ticket)
        await router.offer(request, ticket)
        await until(lambda: pair.d.read_faults.num_reads == 1)
        await router.d.session.close()
        again = await second_line(router)
        await again.offer(request, ticket)
        if not is_done:
            done = await again.prefilled(request, ticket)
        await again.begin(request, done)
        tokens, receipt = await again.rest("r")
        assert tokens == oracle(request)[1:]
        assert receipt.fetched_bytes > 0
        pair.d.read_faults.resume()
        await again.d.session.close()


async def test_abort_at_the_decode_worker_ends_a_running_prefill_too() -> None:
    pair = pair_with_chunks()
    pair.p.gate_s = 0.05
    async with running(pair) as router:
        request = long_request()
        await router.offer(request, await router.submit(request))
        await until(lambda: num_written_blocks(pair) > 0)
        await router.abort(request)
        with pytest.raises(SplitserveError):
            await router.p.answer("r")


async def test_owner_that_stops_in_the_middle_of_a_prefill_leaves_the_rest_to_the_router() -> None:
    pair = pair_with_chunks()
    pair.p.gate_s = 0.05
    async with running(pair) as router:
        request = long_request()
        await router.offer(request, await router.submit(request))
        await until(lambda: num_written_blocks(pair) > 0)
        await pair.prefill.stop()
        await router.abort(request)
        await until(lambda: pair.decode.record().load.num_held == 0)


@pytest.mark.parametrize("policy", OnKvFailure)
async def test_bit_that_flips_on_the_way_is_found_by_the_checksums(policy: OnKvFailure) -> None:
    pair = Pair(policy, compares_checksums=True)
    async with running(pair) as router:
        tokens, receipt = await router.generate(make_request("clean", 30))
        assert tokens == oracle(make_request("clean", 30))
        assert receipt.fetched_bytes > 0
        pair.d.read_faults.script(FaultKind.BIT_FLIP)
        request = replace(make_request("flipped", 30), cache_salt="another")
        if policy is OnKvFailure.FAIL:
            with pytest.raises(TransferFailed, match="wrong checksum"):
                await router.generate(request)
        else:
            tokens, receipt = await router.generate(request)
            assert tokens == oracle(request)
            assert receipt.fetched_bytes == 0, "it was computed anew"


async def test_request_without_a_ticket_is_computed_by_the_decode_worker() -> None:
    pair = Pair()
    async with running(pair) as router:
        request = make_request(num_prompt=20, outputs=(3, 4))
        await router.offer(request)
        tokens, receipt = await router.rest("r")
        assert tokens == oracle(request)
        assert receipt.fetched_bytes == 0
        await router.offer(make_request("again", 20))
        _, receipt = await router.rest("again")
        assert receipt.num_cached_tokens >= 16


async def test_choices_without_a_ticket_are_those_of_requests_of_one_choice() -> None:
    pair = Pair()
    async with running(pair) as router:
        request = replace(make_request(num_prompt=13), n=3)
        await router.offer(request)
        tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
        num_open = 3
        while num_open:
            delta = await router.d.answer("r")
            tokens[delta.index] += [token.token_id for token in delta.tokens]
            num_open -= bool(delta.finish_reason)
        assert tokens == {index: oracle(choice_of(request, index)) for index in range(3)}


async def test_frames_tell_how_many_submissions_the_credit_accounts_for() -> None:
    pair = Pair()
    async with running(pair) as router:
        credits: list[pb.Credit] = []
        router.d.on_credit = credits.append
        await router.generate(make_request())
        await until(lambda: credits and credits[-1].num_submissions == 1)
        await until(lambda: credits[-1].blocks == pair.decode.record().load.blocks_total)


async def test_drain_lets_what_runs_end_and_takes_nothing_new() -> None:
    pair = Pair()
    pair.d.gate_s = 0.02
    async with running(pair) as router:
        request = make_request()
        done = await router.overlap(request)
        assert done.num_open
        await router.d.answer("r")
        draining = asyncio.create_task(pair.decode.drain(LIMIT_S))
        await until(lambda: pair.decode.record().draining)
        late = make_request("late")
        ticket = await router.submit(late)
        await router.offer(late, ticket)
        with pytest.raises(WorkerUnavailable, match="shutting down"):
            await router.d.answer("late")
        await router.p.session.send(pb.PrefillCommand(release_ticket_id=ticket.ticket_id))
        tokens, _ = await router.rest("r")
        assert tokens == oracle(request)[2:]
        assert await draining is True
        assert pair.decode.record().draining


async def test_what_runs_at_the_limit_of_a_drain_goes_back_to_its_router_with_its_ticket() -> None:
    pair = Pair()
    pair.d.gate_s = 0.05
    pair.d.read_faults.script(None)
    pair.d.read_faults.script(FaultKind.STALL)
    async with running(pair) as router:
        decoding, fetching = make_request("decoding"), replace(make_request("fetching"), cache_salt="x")
        await router.overlap(decoding)
        await router.d.answer("decoding")
        done = await router.prefill(fetching)
        await router.hand_over(fetching, done)
        await until(lambda: pair.d.read_faults.num_reads == 2)
        assert await pair.decode.drain(0.01) is False
        with pytest.raises(WorkerUnavailable, match="drained"):
            await router.rest("decoding")
        with pytest.raises(WorkerUnavailable, match="drained"):
            await router.rest("fetching")
        assert not pair.prefill_is_idle, "the ticket is still good"
        await router.p.session.send(pb.PrefillCommand(release_ticket_id=done.ticket.ticket_id))
        pair.d.read_faults.resume()


async def test_resumed_request_decodes_on_after_a_prefill_of_what_was_emitted() -> None:
    """As after the death of a decode worker: the prompt and what was emitted are the next leg's prompt."""
    pair = pair_with_chunks()
    async with running(pair) as router:
        request = long_request()
        whole, _ = await router.generate(request)
        resumed = replace(request, request_id="r2", output_token_ids=tuple(whole[:5]))
        tokens, receipt = await router.generate(resumed)
        assert whole[:5] + tokens == whole == oracle(request)
        assert receipt.fetched_bytes < NUM_PROMPT // BLOCK_SIZE * BLOCK_BYTES, "D had most of it"


async def test_prefill_that_is_aborted_at_its_owner_leaves_nothing_at_the_decode_worker() -> None:
    pair = pair_with_chunks(OnKvFailure.FAIL)
    pair.p.gate_s = 0.05
    async with running(pair) as router:
        request = long_request()
        await router.offer(request, await router.submit(request))
        await until(lambda: num_written_blocks(pair) > 0)
        await router.p.session.send(pb.PrefillCommand(abort_request_id="r"))
        with pytest.raises(SplitserveError):
            await router.d.answer("r")
