"""What the HTTP side needs beside its routes: bodies, errors, streams, clients that leave, keys, ids."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.errors import InvalidRequest, RequestCancelled, SplitserveError, Unauthorized
from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_HEADER = "x-request-timeout"
MAX_MESSAGE_CHARACTERS = 1000
"""Of an error; a chat template's own refusal may quote a whole conversation."""

_LAST_ANSWER = {"connection": "close"}
"""What is left of a body that was given up would be read for as long as the client sends it."""
_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_ESCAPED = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises a 413 as soon as it is known to be too large, a 408 when it takes too long,
    and `RequestCancelled`."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes > max_bytes:
                    raise _too_large(max_bytes)
                parts.append(part)
    except ClientDisconnect as error:
        raise RequestCancelled("the client went away") from error
    except TimeoutError as error:
        detail = f"the body did not arrive within {timeout_s:g} s"
        raise HTTPException(408, detail, headers=_LAST_ANSWER) from error
    return b"".join(parts)


def _too_large(max_bytes: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than {max_bytes} bytes", headers=_LAST_ANSWER)


def timeout_of(request: Request, longest_s: float) -> float:
    """Seconds that the request may take: from its header, at most the server's own limit."""
    value = request.headers.get(TIMEOUT_HEADER)
    if value is None:
        return longest_s
    try:
        timeout_s = float(value)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s < math.inf:
        raise InvalidRequest(f"the header {TIMEOUT_HEADER} must be a number of seconds above 0")
    return min(timeout_s, longest_s)


def check_api_key(request: Request, api_key: str | None) -> None:
    """Raise `Unauthorized` unless the request carries the key, or none is needed."""
    if api_key is None:
        return
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), api_key.encode()):
        raise Unauthorized("the API key is missing or wrong", code="invalid_api_key")


def error_body(error: SplitserveError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {
        "error": {
            "message": error.message[:MAX_MESSAGE_CHARACTERS],
            "type": error.openai_type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: SplitserveError) -> JSONResponse:
    """The response for an error of the tree."""
    response = JSONResponse(error_body(error), status_code=error.http_status)
    if error.retry_after_s is not None:
        response.headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthorized):
        response.headers["www-authenticate"] = "Bearer"
    return response


def http_error_response(error: HTTPException) -> JSONResponse:
    """The response for an error of the HTTP layer itself: path, method, size."""
    codes = {404: "not_found", 405: "method_not_allowed", 408: "timeout", 413: "request_too_large"}
    code = codes.get(error.status_code)
    body = {"message": error.detail, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": body}, status_code=error.status_code, headers=error.headers)


async def until_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; cancels it and raises `RequestCancelled` when the client goes away first.

    The request's body must have been read.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestCancelled("the client went away")
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events made from `source`, which is closed in every case, a leaving client's included.

    Closing `events` alone would not do: a generator that has not started runs no `finally`.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], source: AsyncGenerator[Any, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._events = events
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source), aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await until_disconnected(receive, self._send_all(send))
            except RequestCancelled:
                logger.debug("a client left its stream")

    async def _send_all(self, send: Send) -> None:
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event, in one line for clients that take Unicode's other line ends for ends, too."""
    return b"data: " + _COMPACT.encode(body).translate(_ESCAPED).encode() + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"


class Envelope:
    """Outermost layer: gives every request an id, and counts every response by path and status.

    Answers for bugs, too, lest theirs be the responses without id and count.
    """

    def __init__(self, app: ASGIApp, metrics: RouterMetrics, known_paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._known_paths = known_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        path = scope["path"] if scope["path"] in self._known_paths else "other"
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
                self._metrics.responses.labels(path, str(message["status"])).inc()
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            if has_started:  # nothing can be said any more; the server logs it and cuts the client off
                raise
            logger.exception("request %s failed", request_id)
            # The client learns nothing about it.
            bug = SplitserveError("internal error", code="internal_error")
            await error_response(bug)(scope, receive, send_with_id)
