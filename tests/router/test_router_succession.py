"""One router takes over from another on the same port, and no client notices."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, StreamingResponse

from router.http_limits import ClientLimits
from router.http_server import HttpServer
from router.listener import Listen, bind

HOST = "127.0.0.1"
ASK = b"GET /who HTTP/1.1\r\nhost: x\r\n\r\n"


def app_of(name: str, gate: asyncio.Event) -> FastAPI:
    """Tells its name; `/stream` ends when the gate opens."""
    app = FastAPI()

    @app.get("/who")
    async def who() -> PlainTextResponse:
        return PlainTextResponse(name)

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def parts() -> AsyncIterator[str]:
            yield "first "
            await gate.wait()
            yield f"last of {name}"

        return StreamingResponse(parts())

    @app.get("/much")
    async def much() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            while not gate.is_set():
                await asyncio.sleep(0)
                yield bytes(100_000)

        return StreamingResponse(parts())

    return app


async def nothing() -> None:
    """No requests of its own to end."""


class Port:
    """Servers on one port, one after the other or together."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.servers: list[HttpServer] = []
        self.port = 0

    async def bind(self) -> socket.socket:
        return await asyncio.to_thread(bind, Listen(HOST, self.port))

    async def serve(self, name: str, limits: ClientLimits | None = None) -> HttpServer:
        listener = await self.bind()
        self.port = listener.getsockname()[1]
        server = HttpServer(app_of(name, self.gate), listener, drain_s=0, limits=limits)
        self.servers.append(server)
        return server

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(HOST, self.port)


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    async with _port() as port:
        yield port


@asynccontextmanager
async def _port() -> AsyncIterator[Port]:
    port = Port()
    try:
        yield port
    finally:
        port.gate.set()
        for server in port.servers:
            await server.stop(nothing)


async def test_what_waits_in_the_queue_of_the_old_router_is_answered_by_the_new_one(port: Port) -> None:
    """With a socket of its own each, the kernel would reset these connections."""
    old = await port.serve("old")
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port.port}") as client:
        assert (await client.get("/who")).text == "old"
        heir = await port.bind()
        await asyncio.wait_for(old.drain(limit_s=0), 5)
        early = [socket.create_connection((HOST, port.port)) for _ in range(20)]
        for connection in early:
            connection.sendall(ASK)
        new = HttpServer(app_of("new", port.gate), heir, drain_s=0)
        port.servers.append(new)
        for connection in early:
            connection.setblocking(False)
            answer = await asyncio.get_running_loop().sock_recv(connection, 1000)
            connection.close()
            assert answer.endswith(b"new")


async def test_streams_of_the_old_router_go_on_while_the_new_one_serves(port: Port) -> None:
    old = await port.serve("old")
    url = f"http://{HOST}:{port.port}"
    async with httpx.AsyncClient(base_url=url) as client, client.stream("GET", "/stream") as stream:
        parts = stream.aiter_text()
        assert await anext(parts) == "first "
        await port.serve("new")
        draining = asyncio.create_task(old.drain(limit_s=30))
        await asyncio.sleep(0)
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{port.port}") as other:
            names = {(await other.get("/who")).text for _ in range(5)}
        assert "new" in names
        assert not draining.done()
        port.gate.set()
        assert await anext(parts) == "last of old"
    await asyncio.wait_for(draining, 10)


async def test_an_idle_connection_is_answered_once_more_and_then_closed(port: Port) -> None:
    old = await port.serve("old")
    reader, writer = await port.connect()
    writer.write(ASK)
    first = await reader.readuntil(b"\r\n\r\nold")
    assert b"connection: close" not in first
    draining = asyncio.create_task(old.drain(limit_s=30))
    await asyncio.sleep(0.1)
    writer.write(ASK)
    last = await reader.read()
    assert b"connection: close" in last
    assert last.endswith(b"old")
    await asyncio.wait_for(draining, 5)
    writer.close()


async def test_each_router_hands_the_port_on(port: Port) -> None:
    """The third one gets it from the second one, and it is the same socket still."""
    first = await port.serve("1")
    second = await port.serve("2")
    await first.drain(0)
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port.port}") as client:
        assert (await client.get("/who")).text == "2"
        for _ in range(100):  # until the second one offers
            with await port.bind() as heir:
                if heir.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    break
            await asyncio.sleep(0.05)
        else:
            pytest.fail("the second router offers no socket")
        await port.serve("3")
        await second.drain(0)
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port.port}") as client:
        assert (await client.get("/who")).text == "3"


async def test_a_client_that_sends_its_head_too_slowly_is_told_and_cut_off(port: Port) -> None:
    await port.serve("x", ClientLimits(head_timeout_s=0.2))
    reader, writer = await port.connect()
    writer.write(ASK)
    await reader.readuntil(b"\r\n\r\nx")
    writer.write(b"GET /who HTTP/1.1\r\nhost")
    assert (await asyncio.wait_for(reader.read(), 5)).endswith(
        b"408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    )
    writer.close()


async def test_a_client_that_connects_and_says_nothing_is_cut_off(port: Port) -> None:
    await port.serve("x", ClientLimits(head_timeout_s=0.1))
    reader, writer = await port.connect()
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


async def test_an_endless_head_is_refused(port: Port) -> None:
    await port.serve("x")
    reader, writer = await port.connect()
    writer.write(b"GET /who HTTP/1.1\r\nx: " + b"y" * 70_000)
    assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 431")
    writer.close()


async def test_a_client_that_reads_nothing_is_cut_off_and_its_request_ends(port: Port) -> None:
    server = await port.serve("x", ClientLimits(read_timeout_s=0.2))
    _, writer = await port.connect()
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(b"GET /much HTTP/1.1\r\nhost: x\r\n\r\n")
    await asyncio.sleep(0.1)
    await asyncio.wait_for(server.drain(30), 10)
    writer.close()
