"""Who frees what: clients that leave, decode workers and prefill workers that die, in every state.

Time is stepped by hand, and the bench ends with the assertion that nothing is left anywhere: no request,
no ticket, no credit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from router_kit import MODEL, Bench, bench
from virtual_time import settle, virtual_time

from protocol.errors import DeadlineExceeded, WorkerUnavailable
from protocol.generation import GenerationRequest, SamplingParams
from protocol.ids import Role
from router.scripted_worker import ScriptedWorker

TEXT = "abcdefghijklmnop"


@dataclass(frozen=True)
class State:
    """A point at which a request stands still."""

    name: str
    stop_at: Callable[[ScriptedWorker], None]
    """Applied to all workers before the request comes."""
    is_reached: Callable[[Scene], bool]


def _full(worker: ScriptedWorker) -> None:
    worker.is_full = worker.is_prefill


def _computing(worker: ScriptedWorker) -> None:
    worker.num_until_pause = 0 if worker.is_prefill else None


def _reading(worker: ScriptedWorker) -> None:
    worker.is_reading = not worker.is_prefill


def _decoding(worker: ScriptedWorker) -> None:
    worker.num_until_pause = None if worker.is_prefill else 2


QUEUED = State("queued at P", _full, lambda scene: bool(scene.owner.running))
RUNNING = State("running at P, offered to D", _computing, lambda scene: bool(scene.reader.running))
FETCHING = State("held at P, fetched by D", _reading, lambda scene: bool(scene.reader.num_first_tokens))
DECODING = State("decoding at D", _decoding, lambda scene: scene.reader.num_until_pause == 0)
STATES = (QUEUED, RUNNING, FETCHING, DECODING)
BEFORE_FIRST_DELTA = (QUEUED, RUNNING, FETCHING)

in_every_state = pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
before_first_delta = pytest.mark.parametrize("state", BEFORE_FIRST_DELTA, ids=lambda state: state.name)


@dataclass
class Scene:
    """One request that stands still in a state, over a pair of workers of either role."""

    running: Bench
    task: asyncio.Task[Any]

    def _used(self, role: Role) -> ScriptedWorker:
        workers = self.running.workers(role)
        return next((worker for worker in workers if worker.requests), workers[0])

    @property
    def owner(self) -> ScriptedWorker:
        return self._used(Role.PREFILL)

    @property
    def reader(self) -> ScriptedWorker:
        return self._used(Role.DECODE)

    def other(self, used: ScriptedWorker) -> ScriptedWorker:
        return next(w for w in self.running.workers(used.record.role) if w is not used)

    def go_on(self) -> None:
        for worker in self.running.cluster.workers_by_identity.values():
            worker.resume()

    @property
    def num_prefills(self) -> int:
        return sum(len(worker.requests) for worker in self.running.workers(Role.PREFILL))


@asynccontextmanager
async def scene(state: State, deadline_s: float = 30.0, **changes: Any) -> AsyncIterator[Scene]:
    changes = {"num_prefill": 2, "num_decode": 2} | changes
    async with bench(TEXT, **changes) as running:
        for worker in running.cluster.workers_by_identity.values():
            state.stop_at(worker)
        asked = GenerationRequest(
            running.router.new_request_id(), (1, 2, 3), SamplingParams(100, seed=11), deadline_s=deadline_s
        )
        found = Scene(running, asyncio.create_task(_text_of(running, asked)))
        await running.until(lambda: state.is_reached(found))
        yield found


async def _text_of(running: Bench, asked: GenerationRequest) -> str:
    token_ids: list[int] = []
    async with aclosing(running.router.orchestrator.generate(asked)) as deltas:
        async for delta in deltas:
            token_ids.extend(token.token_id for token in delta.tokens)
    return running.tokenizer.decode(token_ids)


def assert_nothing_is_left(found: Scene) -> None:
    """Now, and not only when leases have lapsed."""
    found.running.router.assert_idle()
    found.running.cluster.assert_idle()


@in_every_state
def test_leaving_client_frees_everything_at_once(state: State) -> None:
    @virtual_time
    async def scenario() -> None:
        async with scene(state) as found:
            found.task.cancel()
            await asyncio.wait([found.task])
            await settle()
            assert found.task.cancelled()
            assert_nothing_is_left(found)
            if state in (QUEUED, RUNNING):
                assert found.owner.aborted == [found.owner.requests[0].request_id]
            if state is not QUEUED:
                assert found.reader.aborted == [found.reader.requests[0].request_id]
            if state is FETCHING:
                assert found.owner.released == found.owner.tickets

    scenario()


@in_every_state
def test_deadline_frees_everything_at_once(state: State) -> None:
    @virtual_time
    async def scenario() -> None:
        async with scene(state, deadline_s=5.0) as found:
            with pytest.raises(DeadlineExceeded):
                await found.task
            assert_nothing_is_left(found)

    scenario()


@before_first_delta
def test_ticket_is_offered_to_another_decode_worker_when_its_reader_dies(state: State) -> None:
    @virtual_time
    async def scenario() -> None:
        async with scene(state) as found:
            used = found.reader
            if state is QUEUED:  # nobody knows yet whom the router has in mind
                (used,) = [w for w in found.running.router.workers.decode_workers() if w.num_outstanding]
                used = found.running.cluster.workers_by_identity[used.identity]
            other = found.other(used)
            used.kill()
            await settle()
            if state is not QUEUED:
                assert other.tickets == used.tickets  # at once, while the prompt may still be computed
            found.go_on()
            assert await found.task == TEXT
            assert found.num_prefills == 1
            assert other.requests[0].output_token_ids == ()
            assert found.owner.aborted == found.owner.released == []

    scenario()


@virtual_time
async def test_stream_is_resumed_when_its_decode_worker_dies_later() -> None:
    async with scene(DECODING) as found:
        used = found.reader
        other = found.other(used)
        used.kill()
        found.go_on()
        assert await found.task == TEXT
        assert found.num_prefills == 2
        assert [len(leg.output_token_ids) for leg in other.requests] == [3]


@before_first_delta
def test_prompt_is_computed_elsewhere_when_its_prefill_worker_dies(state: State) -> None:
    @virtual_time
    async def scenario() -> None:
        async with scene(state) as found:
            used, first_reader = found.owner, found.reader
            other = found.other(used)
            used.kill()
            found.go_on()
            assert await found.task == TEXT
            assert len(other.requests) == 1
            assert len(other.requests[0].output_token_ids) == (1 if state is FETCHING else 0)
            if state is RUNNING:
                assert first_reader.aborted == [first_reader.requests[0].request_id]

    scenario()


@virtual_time
async def test_death_of_the_prefill_worker_has_no_effect_once_its_kv_is_taken() -> None:
    async with scene(DECODING) as found:
        found.owner.kill()
        found.go_on()
        assert await found.task == TEXT
        assert (found.num_prefills, len(found.reader.requests)) == (1, 1)


@pytest.mark.parametrize("state", [RUNNING, FETCHING, DECODING], ids=lambda state: state.name)
def test_request_of_a_decode_worker_that_is_drained_goes_on_elsewhere(state: State) -> None:
    @virtual_time
    async def scenario() -> None:
        async with scene(state) as found:
            used = found.reader
            other = found.other(used)
            await found.running.cluster.announce(replace(used.record, draining=True))
            await asyncio.sleep(0.1)
            used.fail_all(WorkerUnavailable("decode-3 is drained"))
            await settle()
            found.go_on()
            assert await found.task == TEXT
            assert found.num_prefills == (2 if state is DECODING else 1)
            assert len(other.requests) == 1

    scenario()


@virtual_time
async def test_prompt_of_a_prefill_worker_that_is_drained_goes_elsewhere() -> None:
    async with scene(RUNNING) as found:
        used = found.owner
        other = found.other(used)
        used.fail_all(WorkerUnavailable("prefill-1 is drained"))
        found.go_on()
        assert await found.task == TEXT
        assert len(other.requests) == 1


@virtual_time
async def test_ticket_without_another_decode_worker_is_given_back_in_time() -> None:
    """The owner gives its blocks up soon after its reader is gone: waiting longer is of no use."""
    async with scene(FETCHING, num_decode=1) as found:
        found.reader.kill()
        await asyncio.sleep(0.6)
        assert found.owner.released == []
        await asyncio.sleep(0.2)
        assert found.owner.released == found.owner.tickets
        await asyncio.sleep(2.0)
        found.running.cluster.add_worker(Role.DECODE)
        assert await found.task == TEXT
        assert found.num_prefills == 2


@virtual_time
async def test_replacement_that_comes_in_time_takes_the_ticket() -> None:
    async with scene(FETCHING, num_decode=1) as found:
        found.reader.kill()
        await asyncio.sleep(0.5)
        found.running.cluster.add_worker(Role.DECODE)
        assert await found.task == TEXT
        assert found.num_prefills == 1


@virtual_time
async def test_new_offers_count_as_failures_of_the_request() -> None:
    async with scene(RUNNING, num_retries=1, num_decode=3) as found:
        for _ in range(2):
            next(w for w in found.running.workers(Role.DECODE) if w.is_alive and w.running).kill()
            await settle()
        with pytest.raises(WorkerUnavailable):
            await found.task
        assert_nothing_is_left(found)


@virtual_time
async def test_client_has_its_first_tokens_while_another_reader_is_looked_for() -> None:
    async with bench(TEXT) as running:
        running.prefill.num_until_pause = 0
        asked = GenerationRequest(running.router.new_request_id(), (1,), SamplingParams(100, seed=11))
        async with aclosing(running.router.orchestrator.generate(asked)) as deltas:
            first = asyncio.ensure_future(anext(deltas))
            await running.until(lambda: bool(running.decode.running))
            running.decode.kill()
            await settle()
            running.prefill.resume()
            await settle()
            assert first.done()
            replacement = running.cluster.add_worker(Role.DECODE)
            assert len((await anext(deltas)).tokens) == 1
            assert replacement.tickets == running.prefill.tickets


@virtual_time
async def test_bad_transfer_is_held_against_both_of_its_ends() -> None:
    async with scene(FETCHING, num_prefill=3) as found:
        owner, reader = found.owner, found.reader
        owner.is_alive = False  # to its peers; its stream to the router is well
        found.go_on()
        assert await found.task == TEXT
        owner.is_alive = True
        owner.held.clear()
        assert len(owner.requests) == len(reader.requests) == 1


@pytest.mark.parametrize("state", [RUNNING, FETCHING, DECODING], ids=lambda state: state.name)
def test_answer_is_the_same_whatever_dies(state: State) -> None:
    """Logprobs, stop strings and usage, of a stream that was offered again or resumed."""

    @virtual_time
    async def scenario() -> None:
        body = {
            "model": MODEL,
            "prompt": "hello",
            "logprobs": 1,
            "stop": ["hij"],
            "seed": 5,
            "presence_penalty": 0.5,
        }
        async with bench(TEXT, num_decode=2) as running, running.client() as client:
            undisturbed = (await client.post("/v1/completions", json=body)).json()
            for worker in running.cluster.workers_by_identity.values():
                worker.requests.clear()
                worker.num_first_tokens.clear()
                state.stop_at(worker)
            found = Scene(running, asyncio.create_task(_answer(client, body)))
            await running.until(lambda: state.is_reached(found))
            used = found.reader
            used.kill()
            found.go_on()
            answer = await found.task
            assert answer["choices"] == undisturbed["choices"]
            assert answer["usage"] == undisturbed["usage"]
            assert answer["choices"][0]["text"] == "abcdefg"
            assert {leg.sampling for leg in found.other(used).requests} == {used.requests[0].sampling}

    scenario()


async def _answer(client: Any, body: dict[str, Any]) -> Any:
    return (await client.post("/v1/completions", json=body)).json()


@virtual_time
async def test_metrics_tell_what_happened_to_legs() -> None:
    async with scene(FETCHING) as found:
        found.reader.kill()
        found.go_on()
        await found.task
        page = (await found.running.router.metrics_page()).decode()
        assert "splitserve_ticket_reoffers_total 1.0" in page
        assert "splitserve_request_resumes_total 0.0" in page
        assert "splitserve_request_handover_seconds_count 2.0" in page  # the canary's, too
    async with scene(DECODING) as found:
        found.reader.kill()
        found.go_on()
        await found.task
        page = (await found.running.router.metrics_page()).decode()
        assert "splitserve_request_resumes_total 1.0" in page
