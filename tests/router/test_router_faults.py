"""Engines that break, and routers that stop: what the requests of others, and their clients, see of it."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
from router_kit import MODEL, bench

from protocol.errors import EngineFault
from protocol.ids import Role
from router.http_server import HttpServer

TEXT = {"model": MODEL, "prompt": "hi"}


async def test_request_that_met_an_engine_fault_waits_for_the_replacement() -> None:
    async with bench() as running, running.client() as client:
        worker = running.decode
        worker.failures = [EngineFault("broken")]
        task = asyncio.create_task(client.post("/v1/completions", json=TEXT))
        await running.until(lambda: not worker.failures)
        worker.kill()  # as an unfit worker does: it closes its streams
        running.cluster.forget(worker)
        await running.until(lambda: not running.router.workers.decode_workers())
        assert not task.done()
        running.cluster.add_worker(Role.DECODE)
        answer = await task
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "hello world")


async def test_stream_that_a_stopping_router_cuts_off_ends_with_an_error_event() -> None:
    async with bench() as running:
        listener = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
        server = HttpServer(running.app, listener, drain_s=0)
        running.decode.num_until_pause = 1
        received: list[dict[str, Any]] = []
        async with (
            httpx.AsyncClient() as client,
            client.stream("POST", url, json=TEXT | {"stream": True}) as answer,
        ):
            async for line in answer.aiter_lines():
                if not line:
                    continue
                assert line != "data: [DONE]"
                received.append(json.loads(line.removeprefix("data: ")))
                if len(received) == 1:
                    stopping = asyncio.create_task(server.stop(running.router.stop))
        await stopping
        running.decode.kill()
        assert "shuts down" in received[-1]["error"]["message"]
