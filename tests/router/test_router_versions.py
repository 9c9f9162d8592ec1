"""Workers of several versions at once: no stream changes its model, and no pair is made that cannot be."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from router_kit import Bench, bench
from virtual_time import settle, virtual_time

from protocol.errors import DeadlineExceeded, LeaseExpired, WorkerUnavailable
from protocol.generation import GenerationRequest, SamplingParams
from protocol.ids import Role
from protocol.membership import Load
from router.scripted_worker import ScriptedWorker

TEXT = "abcdefgh"
BLOCK_SIZE = 16


class Client:
    """A request in progress."""

    def __init__(
        self, running: Bench, num_blocks: int = 1, deadline_s: float = 60.0, **sampling: Any
    ) -> None:
        self.token_ids: list[int] = []
        self._running = running
        self._request = GenerationRequest(
            running.router.new_request_id(),
            tuple(range(1, num_blocks * BLOCK_SIZE)),
            SamplingParams(**({"max_tokens": 100, "seed": 11} | sampling)),
            deadline_s=deadline_s,
        )
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> str:
        async with aclosing(self._running.router.orchestrator.generate(self._request)) as deltas:
            async for delta in deltas:
                self.token_ids.extend(token.token_id for token in delta.tokens)
        return self._running.tokenizer.decode(self.token_ids)


async def add(running: Bench, role: Role, **changes: Any) -> ScriptedWorker:
    """A worker of another kind, in use."""
    worker = running.cluster.add_worker(role)
    fingerprint = replace(worker.record.fingerprint, **changes)
    await running.cluster.announce(replace(worker.record, fingerprint=fingerprint))
    await running.all_usable()
    return worker


async def lose(running: Bench, worker: ScriptedWorker) -> None:
    worker.kill()
    running.cluster.forget(worker)
    await running.all_usable()


async def in_mid_stream(running: Bench, at: ScriptedWorker) -> Client:
    """A client with three tokens, whose fourth does not come."""
    at.num_until_pause = 2
    client = Client(running)
    await running.until(lambda: len(client.token_ids) == 3)
    return client


def make_full(worker: ScriptedWorker) -> None:
    worker.pool_blocks = 1
    worker.report(Load(num_running=1))


OTHER_CONTENTS = [{"revision": "r2"}, {"dtype": "bfloat16"}, {"kv_dtype": "bfloat16"}, {"model": "another"}]


@pytest.mark.parametrize("changes", OTHER_CONTENTS)
def test_stream_waits_for_a_worker_of_the_model_that_it_began_on(changes: dict[str, Any]) -> None:
    @virtual_time
    async def scenario() -> None:
        async with bench(TEXT) as running:
            first = running.decode
            other = await add(running, Role.DECODE, **changes)
            make_full(other)  # so that the client gets a seat at the first one
            client = await in_mid_stream(running, first)
            other.pool_blocks = 1000
            other.report(Load())
            await lose(running, first)
            await asyncio.sleep(3.0)
            assert (len(client.token_ids), other.requests) == (3, [])
            replacement = await add(running, Role.DECODE)
            assert await client.task == TEXT
            assert [len(leg.output_token_ids) for leg in replacement.requests] == [3]

    scenario()


@virtual_time
async def test_stream_fails_when_its_model_does_not_come_back_in_time() -> None:
    async with bench(TEXT, worker_wait_s=5.0) as running:
        client = await in_mid_stream(running, running.decode)
        other = await add(running, Role.DECODE, revision="r2")
        await lose(running, running.decode)
        with pytest.raises(WorkerUnavailable, match="began on"):
            await client.task
        assert other.requests == []


@virtual_time
async def test_deadline_ends_the_wait_for_the_model_that_a_stream_began_on() -> None:
    async with bench(TEXT, worker_wait_s=5.0) as running:
        running.decode.num_until_pause = 2
        client = Client(running, deadline_s=3.0)
        await running.until(lambda: len(client.token_ids) == 3)
        await add(running, Role.DECODE, revision="r2")
        await lose(running, running.decode)
        with pytest.raises(DeadlineExceeded):
            await client.task


@pytest.mark.parametrize(
    ("changes", "num_tickets"),
    [
        ({"block_size": 32}, 1),
        ({"tensor_parallel_size": 2}, 1),
        ({"pipeline_parallel_size": 2}, 1),
        ({"wire_version": 2}, 0),  # it computes the prompt itself
        ({"kv_layout": "token,block"}, 0),
        ({"head_dim": 9}, 0),
    ],
)
def test_stream_goes_on_where_only_the_form_of_the_kv_differs(
    changes: dict[str, Any], num_tickets: int
) -> None:
    @virtual_time
    async def scenario() -> None:
        async with bench(TEXT) as running:
            first = running.decode
            client = await in_mid_stream(running, first)
            other = await add(running, Role.DECODE, **changes)
            await lose(running, first)
            assert await client.task == TEXT
            assert len(other.tickets) == num_tickets

    scenario()


@virtual_time
async def test_stream_goes_on_without_the_prefill_worker_of_another_version() -> None:
    """Its own has left: the decode worker that is its like computes the prompt."""
    async with bench(TEXT, num_decode=2) as running:
        first, second = running.workers(Role.DECODE)
        make_full(second)
        client = await in_mid_stream(running, first)
        await add(running, Role.PREFILL, revision="r2")
        await lose(running, running.prefill)
        second.pool_blocks = 1000
        await lose(running, first)
        second.report(Load())
        assert await client.task == TEXT
        assert (len(second.requests), second.tickets) == (1, [])


@virtual_time
async def test_last_token_of_a_stream_is_not_another_models() -> None:
    async with bench(TEXT, local_prefill_on_failure=False) as running:
        running.decode.num_until_pause = 2
        client = Client(running, max_tokens=4)
        await running.until(lambda: len(client.token_ids) == 3)
        other = await add(running, Role.PREFILL, revision="r2")
        await lose(running, running.prefill)
        await lose(running, running.decode)
        await asyncio.sleep(1.0)
        replacement = await add(running, Role.PREFILL)
        assert await client.task == TEXT[:4]
        assert (len(other.requests), len(replacement.requests)) == (0, 1)


@virtual_time
async def test_choices_that_go_on_apart_stay_with_their_model() -> None:
    async with bench(TEXT, worker_wait_s=5.0) as running:
        first = running.decode
        first.num_until_pause = 2
        asked = GenerationRequest(
            running.router.new_request_id(), (1, 2, 3), SamplingParams(100, seed=11), deadline_s=60.0, n=2
        )
        got: list[int] = []

        async def run() -> None:
            async with aclosing(running.router.orchestrator.generate(asked)) as deltas:
                async for delta in deltas:
                    got.append(delta.index)

        task = asyncio.create_task(run())
        await running.until(lambda: len(got) >= 4)
        other = await add(running, Role.DECODE, revision="r2")
        await lose(running, first)
        with pytest.raises(WorkerUnavailable):
            await task
        assert other.requests == []


@virtual_time
async def test_request_without_tokens_may_go_to_any_version() -> None:
    async with bench(TEXT) as running:
        first = running.decode
        first.is_reading = True
        running.prefill.num_until_pause = 0
        client = Client(running)
        await running.until(lambda: bool(first.requests))
        other = await add(running, Role.DECODE, revision="r2")
        await lose(running, first)
        await asyncio.sleep(1.0)
        running.prefill.resume()
        assert await client.task == TEXT
        assert len(other.requests) == 1


@virtual_time
async def test_those_who_wait_for_credit_are_not_seated_beside_another_versions_prefill_worker() -> None:
    """The last decode worker that fits goes while they wait: another one computes their prompts itself."""
    async with bench(TEXT) as running:
        old = running.decode
        new = await add(running, Role.DECODE, revision="r2")
        make_full(old)
        clients = [Client(running, 2) for _ in range(3)]
        await settle()
        assert running.router.workers.credits.num_waiting == 3
        await lose(running, old)
        for client in clients:
            assert await client.task == TEXT
        assert (len(new.requests), new.tickets) == (3, [])
        page = (await running.router.metrics_page()).decode()
        assert 'splitserve_local_prefills_total{reason="no_pair"} 3.0' in page


@virtual_time
async def test_those_who_may_not_do_without_a_prefill_worker_wait_for_one_that_fits() -> None:
    async with bench(TEXT, worker_wait_s=5.0) as running:
        await lose(running, running.decode)
        new = await add(running, Role.DECODE, revision="r2")
        scored = [Client(running, prompt_logprobs=0) for _ in range(2)]
        await settle()
        assert await Client(running).task == TEXT  # and hold nobody up who may
        assert (len(new.requests), new.tickets) == (1, [])
        owner = await add(running, Role.PREFILL, revision="r2")
        for client in scored:
            assert await client.task == TEXT
        assert len(owner.requests) == 2
        await lose(running, owner)
        with pytest.raises(WorkerUnavailable, match="of use"):
            await Client(running, prompt_logprobs=0).task


@virtual_time
async def test_canary_says_that_no_pair_is_there_while_decode_workers_are_busy() -> None:
    async with bench(TEXT, canary_interval_s=10.0) as running:
        await lose(running, running.decode)
        new = await add(running, Role.DECODE, revision="r2")
        for second in range(60):
            new.report(Load(num_running=1, progress=1 + second))
            await asyncio.sleep(1.0)
        assert "of use" in (running.router.not_ready_because() or "")
        await add(running, Role.DECODE)
        await running.until(lambda: running.router.not_ready_because() is None)


@virtual_time
async def test_idle_worker_that_failed_a_request_once_is_better_than_a_full_one() -> None:
    """And whoever comes after that request does not wait for the full one either."""
    async with bench(TEXT, num_decode=2) as running:
        full, other = running.workers(Role.DECODE)
        make_full(full)
        other.num_until_pause = 2
        victim = Client(running, 2)
        await running.until(lambda: len(victim.token_ids) == 3)
        other.fail_all(WorkerUnavailable("a blip"))
        other.resume()
        later = [Client(running, 2) for _ in range(3)]
        assert {await client.task for client in (victim, *later)} == {TEXT}
        assert full.requests == []


@virtual_time
async def test_ticket_that_waits_for_another_reader_holds_nobody_up() -> None:
    async with bench(TEXT, num_decode=2) as running:
        full, first = running.workers(Role.DECODE)
        make_full(full)
        running.prefill.num_until_pause = 0
        client = Client(running, 2)
        await running.until(lambda: bool(first.running))
        first.fail_all(WorkerUnavailable("a blip"))
        await settle()
        assert running.router.workers.credits.num_waiting == 1  # for the full one
        running.prefill.resume()
        assert await Client(running, 2).task == TEXT
        assert not client.task.done()
        assert await client.task == TEXT


@virtual_time
async def test_load_counts_for_the_credit_that_comes_with_it() -> None:
    """An idle worker takes any request: nobody waits for another frame to learn that it is idle."""
    async with bench(TEXT) as running:
        make_full(running.decode)
        client = Client(running, 2)
        await settle()
        assert running.router.workers.credits.num_waiting == 1
        running.decode.report(Load(blocks_total=1))
        await settle()
        assert running.router.workers.credits.num_waiting == 0
        assert await client.task == TEXT


@virtual_time
async def test_owner_that_gave_its_blocks_up_is_not_the_first_to_be_asked_again() -> None:
    async with bench(TEXT, num_prefill=2) as running:
        running.workers(Role.PREFILL)[1].report(Load(num_waiting_tokens=1000))
        running.decode.failures = [LeaseExpired("gone")]
        assert await Client(running).task == TEXT
        assert [len(worker.requests) for worker in running.workers(Role.PREFILL)] == [1, 1]


@virtual_time
async def test_owner_that_gives_its_blocks_up_again_is_done_without() -> None:
    async with bench(TEXT) as running:
        running.decode.failures = [LeaseExpired("gone"), LeaseExpired("gone again")]
        assert await Client(running).task == TEXT
        assert (len(running.prefill.requests), len(running.decode.tickets)) == (2, 2)
