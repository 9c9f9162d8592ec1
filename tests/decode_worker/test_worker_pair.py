"""A prefill and a decode worker, whole, from submission to the last token and to the end of either.

Each test ends with both engines and all pools idle.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from pair_kit import LIMIT_S, Line, Pair, choice_of, is_idle, oracle, running, until
from worker_fakes import BLOCK_SIZE, D0, FINGERPRINT, make_request

from decode_worker import DecodeWorker, OnKvFailure
from engine.fake_executor import FakeExecutor
from kv_transfer import FaultKind
from prefill_worker import PrefillWorker
from protocol.codec import request_to_wire, ticket_from_wire, token_from_wire
from protocol.errors import (
    EngineFault,
    LayoutMismatch,
    LeaseExpired,
    StartupError,
    TransferFailed,
    TransferTimeout,
    Unauthorized,
    WorkerUnavailable,
)
from protocol.handoff import Ticket
from protocol.wire import splitserve_pb2 as pb
from protocol.wire.splitserve_pb2_grpc import DecodeWorkerStub, PrefillWorkerStub, WorkerAdminStub
from rpc import open_channel, rpc_errors


async def test_split_generation_gives_the_tokens_of_an_undivided_one() -> None:
    pair = Pair()
    async with running(pair) as router:
        requests = [make_request(f"r{i}", num_prompt=5 + 7 * i) for i in range(8)]
        results = await asyncio.gather(*map(router.generate, requests))
        assert [tokens for tokens, _ in results] == list(map(oracle, requests))
        for worker in (pair.prefill, pair.decode):
            worker.check_health()


async def test_first_token_is_never_sent_twice_and_the_receipt_tells_the_fetch() -> None:
    pair = Pair()
    async with running(pair) as router:
        request = make_request(num_prompt=10)
        done = await router.prefill(request)
        assert len(done.firsts[0].tokens) == 1
        await router.hand_over(request, done)
        tokens, receipt = await router.rest("r")
        assert len(tokens) == request.sampling.max_tokens - 1
        assert receipt.fetched_bytes == 3 * BLOCK_SIZE * 8


async def test_request_of_one_token_never_leaves_the_prefill_worker() -> None:
    pair = Pair()
    async with running(pair) as router:
        request = make_request()
        request = replace(request, sampling=replace(request.sampling, max_tokens=1))
        done = await router.overlap(request)
        assert done.firsts[0].finish_reason == "length"
        await pair.until_idle()


async def test_second_run_of_a_prompt_fetches_only_what_is_not_cached() -> None:
    pair = Pair()
    async with running(pair) as router:
        first, second = make_request("a", 12), make_request("b", 12)
        tokens, receipt = await router.generate(first)
        assert receipt.fetched_bytes == 3 * BLOCK_SIZE * 8
        again, receipt = await router.generate(second)
        assert again == tokens
        assert receipt.fetched_bytes < 3 * BLOCK_SIZE * 8


@pytest.mark.parametrize("num_prompt", [5, 8, 11, 30])
async def test_choices_give_the_tokens_of_requests_of_one_choice(num_prompt: int) -> None:
    pair = Pair()
    async with running(pair) as router:
        requests = [replace(make_request(f"r{i}", num_prompt), n=4) for i in range(3)]
        results = await asyncio.gather(*map(router.generate_choices, requests))
        for request, tokens in zip(requests, results, strict=True):
            assert tokens == {index: oracle(choice_of(request, index)) for index in range(4)}


async def test_choices_are_fetched_once_for_all() -> None:
    pair = Pair()
    async with running(pair) as router:
        request = replace(make_request(num_prompt=10), n=3)
        await router.hand_over(request, await router.prefill(request))
        delta = await router.d.answer("r")
        assert delta.receipt.fetched_bytes == 3 * BLOCK_SIZE * 8


async def test_failed_read_is_made_up_for_in_every_choice() -> None:
    pair = Pair()
    pair.d.read_faults.script(FaultKind.FAIL)
    async with running(pair) as router:
        request = replace(make_request(num_prompt=30), n=3)
        tokens = await router.generate_choices(request)
        assert tokens == {index: oracle(choice_of(request, index)) for index in range(3)}


async def test_one_choice_is_aborted_and_the_others_end_as_ever() -> None:
    pair = Pair()
    pair.d.gate_s = 0.01
    async with running(pair) as router:
        request = replace(make_request(), n=3)
        await router.hand_over(request, await router.prefill(request))
        abort = pb.AbortChoice(request_id="r", index=1)
        await router.d.session.send(pb.DecodeCommand(abort_choice=abort))
        ended: set[int] = set()
        while len(ended) < 2:
            delta = await router.d.answer("r")
            if delta.finish_reason:
                ended.add(delta.index)
        assert ended == {0, 2}


async def test_resumed_choice_continues_where_it_ended() -> None:
    pair = Pair()
    async with running(pair) as router:
        choice = choice_of(replace(make_request(), n=4), 3)
        whole = oracle(choice)
        done = await router.prefill(replace(choice, output_token_ids=tuple(whole[:3])))
        assert [(first.index, first.tokens[0].token_id) for first in done.firsts] == [(3, whole[3])]
        await router.hand_over(replace(choice, output_token_ids=tuple(whole[:3])), done)
        assert (await router.rest("r"))[0] == whole[4:]


async def test_prompt_is_scored_whole_though_it_is_cached_and_computed_in_chunks() -> None:
    pair = Pair()
    async with running(pair) as router:
        await router.generate(make_request("first", 40))
        request = make_request(num_prompt=40)
        scored = replace(request, sampling=replace(request.sampling, prompt_logprobs=1))
        done = await router.prefill(scored)
        tokens = [token_from_wire(token) for token in done.prompt_logprobs]
        assert [token.token_id for token in tokens] == list(request.prompt_token_ids[1:])
        scores = FakeExecutor(BLOCK_SIZE).prompt_scores(request.prompt_token_ids)
        assert [token.logprob for token in tokens] == scores
        await router.hand_over(scored, done)
        assert (await router.rest("r"))[0] == oracle(request)[1:]


@pytest.mark.parametrize("everything", [True, False])
async def test_invalidated_prompt_is_computed_and_fetched_again(everything: bool) -> None:
    pair = Pair()
    async with running(pair) as router:
        request = make_request("before", 12)
        tokens, _ = await router.generate(request)
        command = pb.InvalidateCacheRequest(everything=everything)
        if not everything:
            command.token_ids.extend(request.prompt_token_ids[:BLOCK_SIZE])
        for channel in (router.p.channel, router.d.channel):
            await WorkerAdminStub(channel).InvalidateCache(command, timeout=5)
        again, receipt = await router.generate(make_request("after", 12))
        assert again == tokens
        assert receipt.fetched_bytes == 3 * BLOCK_SIZE * 8


async def test_ticket_that_is_held_during_an_invalidation_is_void() -> None:
    pair = Pair()
    async with running(pair) as router:
        request = make_request(num_prompt=12)
        done = await router.prefill(request)
        for channel in (router.p.channel, router.d.channel):
            await WorkerAdminStub(channel).InvalidateCache(
                pb.InvalidateCacheRequest(everything=True), timeout=5
            )
        await router.hand_over(request, done)
        tokens, receipt = await router.rest("r")
        assert tokens == oracle(request)[1:]
        assert receipt.fetched_bytes == 0, "it was computed anew"


async def test_broken_engine_refuses_to_invalidate() -> None:
    pair = Pair()
    async with running(pair, leaks_expected=True) as router:
        pair.p.breaks = True
        with pytest.raises(EngineFault):
            await router.prefill(make_request())
        with pytest.raises(EngineFault, match="broke"), rpc_errors("p0"):
            await WorkerAdminStub(router.p.channel).InvalidateCache(
                pb.InvalidateCacheRequest(everything=True), timeout=5
            )


async def test_resumed_run_continues_where_the_first_ended() -> None:
    pair = Pair()
    async with running(pair) as router:
        whole = oracle(make_request())
        tokens, _ = await router.generate(make_request(outputs=tuple(whole[:3])))
        assert tokens == whole[3:]


@pytest.mark.parametrize("fault", [FaultKind.FAIL, FaultKind.DELAY])
async def test_failed_or_slow_read_changes_no_token(fault: FaultKind) -> None:
    pair = Pair()
    pair.d.read_faults.script(fault, 0.1)
    async with running(pair) as router:
        request = make_request(num_prompt=30)
        tokens, _ = await router.generate(request)
        assert tokens == oracle(request)
        again, _ = await router.generate(make_request("again", num_prompt=31))
        assert again == oracle(make_request("again", num_prompt=31))


async def test_failed_read_fails_the_request_when_the_policy_says_so() -> None:
    pair = Pair(OnKvFailure.FAIL)
    pair.d.read_faults.script(FaultKind.FAIL)
    async with running(pair) as router:
        with pytest.raises(TransferFailed):
            await router.generate(make_request())
        tokens, _ = await router.generate(make_request("next"))
        assert tokens == oracle(make_request("next"))


@pytest.mark.parametrize("policy", OnKvFailure)
async def test_lease_that_lapsed_before_the_hand_over_is_never_trusted(policy: OnKvFailure) -> None:
    pair = Pair(policy, lease_s=0.2)
    async with running(pair) as router:
        request = make_request()
        done = await router.prefill(request)
        await until(lambda: is_idle(pair.prefill))
        await router.hand_over(request, done)
        if policy is OnKvFailure.FAIL:
            with pytest.raises(LeaseExpired):
                await router.rest("r")
        else:
            tokens, _ = await router.rest("r")
            assert tokens == oracle(request)[1:]


async def test_stalled_read_keeps_its_lease_and_ends_well() -> None:
    """The lease is long enough for a machine that is busy with other things, and still outlasted."""
    pair = Pair(OnKvFailure.FAIL, lease_s=2.0)
    pair.d.read_faults.script(FaultKind.STALL)
    async with running(pair) as router:
        request = make_request()
        await router.hand_over(request, await router.prefill(request))
        await asyncio.sleep(2.5)
        pair.d.read_faults.resume()
        tokens, _ = await router.rest("r")
        assert tokens == oracle(request)[1:]


async def test_router_that_vanishes_during_the_read_leaves_nothing_behind() -> None:
    pair = Pair()
    pair.d.read_faults.script(FaultKind.STALL)
    async with running(pair) as router:
        request = make_request()
        await router.hand_over(request, await router.prefill(request))
        await until(lambda: pair.decode.record().load.num_held == 1)
        await router.d.session.close()
        await until(lambda: pair.decode.record().load.num_held == 1)
        assert not is_idle(pair.decode)
        pair.d.read_faults.resume()
        await pair.until_idle()


async def test_abort_at_the_prefill_worker_frees_everything() -> None:
    pair = Pair()
    pair.p.gate_s = 0.02
    async with running(pair) as router:
        await router.p.session.send(pb.PrefillCommand(submit=request_to_wire(make_request(num_prompt=150))))
        await router.p.session.send(pb.PrefillCommand(abort_request_id="r"))
        await pair.until_idle()
        done = await router.prefill(make_request("held"))
        await router.p.session.send(pb.PrefillCommand(release_ticket_id=done.ticket.ticket_id))
        await pair.until_idle()


async def test_abort_while_decoding_frees_everything() -> None:
    pair = Pair()
    pair.d.gate_s = 0.05
    async with running(pair) as router:
        request = make_request()
        await router.hand_over(request, await router.prefill(request))
        await router.d.answer("r")
        await router.d.session.send(pb.DecodeCommand(abort_request_id="r"))
        await pair.until_idle()


async def test_owner_that_is_gone_means_recompute() -> None:
    pair = Pair()
    async with running(pair) as router:
        request = make_request()
        done = await router.prefill(request)
        await pair.prefill.stop()
        await router.hand_over(request, done)
        tokens, _ = await router.rest("r")
        assert tokens == oracle(request)[1:]


async def test_decode_worker_connects_to_owners_before_any_request() -> None:
    pair = Pair()
    async with running(pair) as router:
        admin = WorkerAdminStub(router.d.channel)

        async def exposition() -> str:
            text: str = (await admin.Metrics(pb.MetricsRequest(), timeout=5)).exposition
            return text

        await until(lambda: pair.decode.num_peers == 1)
        assert "splitserve_kv_peers 1.0" in await exposition()
        await router.generate(make_request())
        text = await exposition()
        assert "splitserve_kv_transfer_blocks_total 3.0" in text
        assert 'splitserve_num_requests_running{role="decode",worker_id="d0"}' in text
        assert "splitserve_kv_cache_usage_perc" in text
        record = await admin.Describe(pb.DescribeRequest(), timeout=5)
        assert (record.role, record.identity.worker_id) == ("decode", "d0")


async def test_workers_that_disagree_exchange_nothing_and_say_why() -> None:
    pair = Pair(decode_fingerprint=replace(FINGERPRINT, revision="r2"))
    async with running(pair) as router:
        with pytest.raises(LayoutMismatch) as caught:
            await router.generate(make_request())
        assert "r1" in caught.value.message
        assert "r2" in caught.value.message


async def refuses(line: Line, stub: Any, worker: PrefillWorker | DecodeWorker) -> None:
    """An unfit worker keeps no stream, lets nobody open another one, and says so to the directory."""
    async with asyncio.timeout(LIMIT_S):
        assert isinstance(await line.broken.get(), WorkerUnavailable)
    with pytest.raises(WorkerUnavailable, match="is broken and will be replaced"):
        await Line(stub, line.channel).session.start()
    assert worker.record().draining


async def test_read_that_never_ends_makes_the_decode_worker_unfit() -> None:
    pair = Pair(fetch_limit_s=0.2)
    pair.d.read_faults.script(FaultKind.STALL)
    async with running(pair, leaks_expected=True) as router:
        with pytest.raises(TransferTimeout):
            await router.generate(make_request())
        await until(lambda: pair.decode.record().draining)
        with pytest.raises(EngineFault, match=r"has not ended in 0\.2 s"):
            pair.decode.check_health()
        await refuses(router.d, DecodeWorkerStub, pair.decode)


async def test_broken_engine_fails_its_requests_and_makes_the_worker_unfit() -> None:
    pair = Pair()
    async with running(pair, leaks_expected=True) as router:
        pair.p.breaks = True
        with pytest.raises(EngineFault):
            await router.prefill(make_request())
        with pytest.raises(EngineFault):
            pair.prefill.check_health()
        await refuses(router.p, PrefillWorkerStub, pair.prefill)


async def test_stop_during_work_is_told_to_the_router_and_loses_no_block() -> None:
    pair = Pair()
    pair.d.gate_s = 0.05
    async with running(pair) as router:
        request = make_request()
        await router.hand_over(request, await router.prefill(request))
        await router.d.answer("r")
        await pair.decode.stop()
        async with asyncio.timeout(LIMIT_S):
            assert isinstance(await router.d.broken.get(), WorkerUnavailable)
        assert D0 not in pair.directory.records


async def test_graceful_stop_lets_requests_end() -> None:
    pair = Pair()
    pair.d.gate_s = 0.02
    async with running(pair) as router:
        request = make_request()
        await router.hand_over(request, await router.prefill(request))
        first = await router.d.answer("r")
        stopping = asyncio.create_task(pair.decode.stop(grace_s=LIMIT_S))
        await until(lambda: pair.directory.records[D0].draining)
        with pytest.raises(WorkerUnavailable, match="shutting down"):
            await router.generate(make_request("late"))
        await router.p.session.send(pb.PrefillCommand(release_ticket_id=router.last_ticket.ticket_id))
        tokens, _ = await router.rest("r")
        assert [t.token_id for t in first.tokens] + tokens == oracle(request)[1:]
        await stopping
        assert D0 not in pair.directory.records


async def test_other_token_reads_no_kv() -> None:
    pair = Pair()
    async with running(pair) as router:
        done = await router.prefill(make_request())
        ticket: Ticket = ticket_from_wire(done.ticket)
        async with open_channel(ticket.owner_address, "guessed") as channel:
            call = PrefillWorkerStub(channel).Release(
                pb.ReleaseRequest(incarnation="p-first", ticket_id=ticket.ticket_id), timeout=5
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(Unauthorized):
            await Line(DecodeWorkerStub, open_channel(router_address(pair), "guessed")).session.start()
        await router.p.session.send(pb.PrefillCommand(release_ticket_id=ticket.ticket_id))


def router_address(pair: Pair) -> str:
    return pair.decode.record().address


async def test_directory_that_fails_harms_no_request() -> None:
    pair = Pair()
    async with running(pair) as router:
        pair.directory.fails_with = WorkerUnavailable("the directory restarts")
        request = make_request()
        tokens, _ = await router.generate(request)
        assert tokens == oracle(request)
        pair.directory.fails_with = None
        pair.decode.check_health()


async def test_worker_without_a_reachable_address_does_not_start() -> None:
    pair = Pair()
    for worker in (pair.prefill, pair.decode):
        with pytest.raises(StartupError, match="which host name"):
            await worker.start("0.0.0.0", 0)  # noqa: S104
    pair.assert_no_block_is_lost()
