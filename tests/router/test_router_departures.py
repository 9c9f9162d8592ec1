"""Clients that leave: whatever their request holds anywhere is given back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from router_kit import MODEL, Bench, bench

from protocol.generation import GenerationRequest, SamplingParams
from protocol.ids import RequestId, Role


class RawClient:
    """One ASGI request whose client can leave at any moment."""

    def __init__(self, running: Bench, **fields: Any) -> None:
        body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 100} | fields).encode()
        self._messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
        self._has_left = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "scheme": "http",
            "server": ("router", 80),
            "client": ("client", 1),
            "root_path": "",
            "http_version": "1.1",
        }
        self.task = asyncio.create_task(running.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop(0)
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def text(self) -> str:
        return b"".join(m.get("body", b"") for m in self.sent).decode()

    def leave(self) -> None:
        self._has_left.set()

    def cut_off(self) -> None:
        """Leave before the body is complete."""
        self._messages[0]["more_body"] = True
        self._has_left.set()


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("stuck", list(Role))
async def test_leaving_client_aborts_its_request_where_it_is(is_stream: bool, stuck: Role) -> None:
    async with bench() as running:
        worker = running.workers(stuck)[0]
        worker.num_until_pause = 0
        client = RawClient(running, stream=is_stream)
        await running.until(lambda: bool(worker.running))
        client.leave()
        await client.task
        assert worker.aborted == [worker.requests[0].request_id]
        page = (await running.router.metrics_page()).decode()
        assert 'splitserve_request_failure_total{error="RequestCancelled"} 1.0' in page


async def test_leaving_client_frees_its_place_in_the_queue() -> None:
    async with bench(max_in_flight=1) as running, running.router.admission.place(0, 1.0):
        client = RawClient(running)
        await running.until(lambda: running.router.admission.num_queued == 1)
        client.leave()
        await client.task
        assert running.router.admission.num_queued == 0


async def test_tokens_reach_the_client_as_they_come() -> None:
    async with bench("hello world and more") as running:
        running.decode.num_until_pause = 2
        client = RawClient(running, stream=True)
        await running.until(lambda: running.decode.num_until_pause == 0 and " w" in client.text)
        assert "hello" in client.text
        assert "[DONE]" not in client.text
        running.decode.resume()
        await client.task
        assert client.text.endswith("data: [DONE]\n\n")


async def test_server_that_shuts_down_cancels_and_leaves_nothing() -> None:
    async with bench() as running:
        running.decode.num_until_pause = 0
        client = RawClient(running, stream=True)
        await running.until(lambda: bool(running.decode.running))
        client.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.task
        assert len(running.decode.aborted) == 1


async def test_client_that_only_reads_slowly_does_not_hold_up_the_hand_off() -> None:
    """The ticket is offered before the first token is written to the client."""
    async with bench() as running:
        request = GenerationRequest(RequestId("slow"), (1,), SamplingParams(max_tokens=9))
        deltas = running.router.orchestrator.generate(request)
        await anext(deltas)
        await running.until(lambda: bool(running.decode.requests))
        await deltas.aclose()


async def test_client_that_leaves_while_it_sends_is_no_error_of_the_server() -> None:
    async with bench() as running:
        client = RawClient(running)
        client.cut_off()
        await client.task
        assert client.sent[0]["status"] == 499
        assert running.prefill.requests == []
