"""What clients and bugs do to the HTTP side itself: slow bodies, deep bodies, answers to bugs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from router_kit import MODEL, bench
from starlette.exceptions import HTTPException
from starlette.requests import Request
from virtual_time import virtual_time

from protocol.errors import InvalidRequest, RequestCancelled
from router.chat_template import ChatTemplate
from router.http import event, http_error_response, read_body

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


def body_request(pause_s: float, num_parts: int) -> Request:
    """A request whose body comes one byte at a time."""
    left = num_parts

    async def receive() -> dict[str, Any]:
        nonlocal left
        await asyncio.sleep(pause_s)
        left -= 1
        return {"type": "http.request", "body": b"x", "more_body": left > 0}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


@virtual_time
async def test_body_that_comes_slowly_but_in_time_is_read() -> None:
    assert await read_body(body_request(1.0, 20), 100, timeout_s=30.0) == b"x" * 20


@virtual_time
async def test_body_that_takes_too_long_is_answered_with_408_and_the_connection_ends() -> None:
    """A sender of a byte now and then would hold a connection for ever."""
    with pytest.raises(HTTPException) as caught:
        await read_body(body_request(1.0, 10_000), 100_000, timeout_s=30.0)
    answer = http_error_response(caught.value)
    assert answer.status_code == 408
    assert answer.headers["connection"] == "close"
    error = json.loads(bytes(answer.body))["error"]
    assert error == {
        "message": "the body did not arrive within 30 s",
        "type": "invalid_request_error",
        "param": None,
        "code": "timeout",
    }


@virtual_time
async def test_client_that_leaves_in_its_body_is_no_time_out() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(RequestCancelled):
        await read_body(Request({"type": "http", "method": "POST", "headers": []}, receive), 9, 30.0)


async def test_setting_bounds_the_body_of_every_route() -> None:
    async def never() -> Any:
        await asyncio.Event().wait()
        yield b""

    async with bench(body_timeout_s=0.01) as running, running.client() as client:
        for path in ("/v1/chat/completions", "/v1/completions", "/reset_prefix_cache"):
            assert (await client.post(path, content=never())).status_code == 408


async def test_bug_is_answered_with_an_id_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with bench() as running, running.client() as client:

        @running.app.get("/health/bug")
        async def bug() -> None:
            raise ZeroDivisionError("secret")

        answer = await client.get("/health/bug", headers={"x-request-id": "mine"})
        assert answer.status_code == 500
        assert answer.headers["x-request-id"] == "mine"
        assert answer.json()["error"]["code"] == "internal_error"
        assert "secret" not in answer.text
        page = (await running.router.metrics_page()).decode()
        assert 'splitserve_http_responses_total{path="other",status="500"} 1.0' in page
    (record,) = [record for record in caplog.records if "request mine failed" in record.message]
    assert record.exc_info is not None


@pytest.mark.parametrize("depth", [100, 300, 500, 700, 800, 900, 950, 980, 990, 2000, 100_000])
@pytest.mark.parametrize(
    "field", ["chat_template_kwargs", "metadata", "response_format", "messages", "stop"]
)
async def test_deeply_nested_body_is_never_an_error_of_the_server(depth: int, field: str) -> None:
    nested = '{"x":' + "[" * depth + "]" * depth + "}"
    fields = {name: json.dumps(value) for name, value in CHAT.items()} | {field: nested}
    body = "{" + ",".join(f'"{name}":{text}' for name, text in fields.items()) + "}"
    async with bench() as running, running.client() as client:
        answer = await client.post("/v1/chat/completions", content=body)
        allowed = (200, 400) if field in ("chat_template_kwargs", "metadata") else (400,)
        assert answer.status_code in allowed


@pytest.mark.parametrize(
    "source", ["{{ x | tojson }}", "{{ x }}", "{% for a in x recursive %}{{ loop(a) }}{% endfor %}"]
)
def test_template_that_meets_too_deep_variables_refuses_them(source: str) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    template = ChatTemplate(source, {})
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        template.render([], {"x": deep})
    while deep:  # level by level, lest the end of the list recurse
        deep = deep.pop()


def test_an_event_is_one_line_for_every_client() -> None:
    """Python's `splitlines`, on which many clients rely, ends lines at U+0085, U+2028 and U+2029, too."""
    text = "a\x85b\u2028c\u2029d\x0be\x1cf\né"
    line, *rest = event({"text": text}).decode().splitlines()
    assert rest == [""]
    assert json.loads(line.removeprefix("data: ")) == {"text": text}
