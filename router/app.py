"""The HTTP routes: OpenAI's API, and what operators ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from protocol.errors import InvalidRequest, SplitserveError
from protocol.membership import WorkerRecord
from router.answers import Piece, TextRequest
from router.batch import answer_together
from router.http import (
    LAST_EVENT,
    Envelope,
    EventStream,
    check_api_key,
    error_body,
    error_response,
    event,
    http_error_response,
    read_body,
    timeout_of,
    until_disconnected,
)
from router.openai.chat import ChatRequest
from router.openai.completions import CompletionRequest
from router.openai.parameters import parse_body, validate
from router.openai.replies import ChatReply, CompletionReply, Reply, ReplyOptions
from router.openai.reset import ResetRequest
from router.openai.sampling import CommonFields
from router.router import Router

__all__ = ["Router", "build_app"]

FieldsT = TypeVar("FieldsT", bound=CommonFields)

LONG_BODY_BYTES = 64 * 1024
"""Longer ones are looked through in a thread: a hundred thousand messages take more than a second."""

_KNOWN_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/health",
        "/ready",
        "/metrics",
        "/reset_prefix_cache",
    }
)


def build_app(router: Router) -> FastAPI:
    """The ASGI application of a router. Starts and stops the router where the server runs lifespans;
    elsewhere whoever made the router does."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await router.start()
        try:
            yield
        finally:
            await router.stop()

    app = FastAPI(title="Splitserve", openapi_url=None, lifespan=lifespan)
    app.include_router(_openai_routes(router))
    app.include_router(_operator_routes(router))
    app.add_exception_handler(SplitserveError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RecursionError, _on_recursion)
    app.add_middleware(Envelope, metrics=router.metrics, known_paths=_KNOWN_PATHS)
    return app


def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, SplitserveError)  # noqa: S101
    return error_response(error)


def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101
    return http_error_response(error)


def _on_recursion(_: Request, __: Exception) -> Response:
    """Only what a client nests goes so deep: JSON that could just be parsed, a template's variables."""
    return error_response(InvalidRequest("the body is nested too deeply", code="invalid_value"))


def _openai_routes(router: Router) -> APIRouter:
    routes = APIRouter(prefix="/v1", dependencies=[_needs_key(router)])

    @routes.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        fields = await _read_fields(ChatRequest, router, request)
        text_request = await router.preparer.chat(
            fields, router.new_request_id(), timeout_of(request, router.settings.request_timeout_s)
        )
        options = _reply_options(router, "chatcmpl", text_request, fields, fields.num_logprobs)
        return await _respond(router, request, [text_request], fields, ChatReply(options, router.tokenizer))

    @routes.post("/completions")
    async def completions(request: Request) -> Response:
        fields = await _read_fields(CompletionRequest, router, request)
        timeout_s = timeout_of(request, router.settings.request_timeout_s)
        text_requests = await router.preparer.completions(fields, router.new_request_id, timeout_s)
        options = _reply_options(router, "cmpl", text_requests[0], fields, fields.logprobs)
        return await _respond(
            router, request, text_requests, fields, CompletionReply(options, router.tokenizer)
        )

    @routes.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(router)]}

    @routes.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        router.preparer.check_model(name)
        return _model(router)

    return routes


def _operator_routes(router: Router) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> Response:
        obstacle = router.unhealthy_because()
        return _status(router, obstacle, None if obstacle else router.impaired_because())

    @routes.get("/ready")
    async def ready() -> Response:
        return _status(router, router.not_ready_because())

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(await router.metrics_page(), headers={"content-type": CONTENT_TYPE_LATEST})

    @routes.post("/reset_prefix_cache", dependencies=[_needs_key(router)])
    async def reset_prefix_cache(request: Request) -> Response:
        body = await _read(router, request)
        fields = validate(ResetRequest, parse_body(body) if body.strip() else {})
        return _reset_report(await router.reset_prefix_cache(fields))

    return routes


def _needs_key(router: Router) -> Any:
    """A dependency of routes: clients must show the API key, if there is one."""

    def check(request: Request) -> None:
        check_api_key(request, router.settings.api_key)

    return Depends(check)


def _reset_report(outcome: Sequence[tuple[WorkerRecord, SplitserveError | None]]) -> Response:
    """Who was reached; 503 unless all were, for the others may still serve what was to be forgotten."""
    workers = [
        {
            "worker_id": record.identity.worker_id,
            "role": record.role.value,
            "error": None if error is None else error.message,
        }
        for record, error in outcome
    ]
    is_complete = all(worker["error"] is None for worker in workers)
    body = {"status": "ok" if is_complete else "incomplete", "workers": workers}
    return JSONResponse(body, status_code=200 if is_complete else 503)


def _status(router: Router, obstacle: str | None, impairment: str | None = None) -> Response:
    """503 for an obstacle; an impairment is only told."""
    body = {
        "status": "unavailable" if obstacle else "degraded" if impairment else "ok",
        "reason": obstacle or impairment,
        "prefill_workers": len(router.workers.prefill_workers()),
        "decode_workers": len(router.workers.decode_workers()),
    }
    return JSONResponse(body, status_code=200 if obstacle is None else 503)


def _model(router: Router) -> dict[str, Any]:
    return {
        "id": router.served_model_name,
        "object": "model",
        "created": router.started_at,
        "owned_by": "splitserve",
        "max_model_len": router.max_model_len,
    }


async def _read_fields(kind: type[FieldsT], router: Router, request: Request) -> FieldsT:
    body = await _read(router, request)
    if len(body) <= LONG_BODY_BYTES:
        return validate(kind, parse_body(body))
    return await asyncio.to_thread(lambda: validate(kind, parse_body(body)))


async def _read(router: Router, request: Request) -> bytes:
    return await read_body(request, router.settings.max_body_bytes, router.settings.body_timeout_s)


def _reply_options(
    router: Router, prefix: str, text_request: TextRequest, fields: CommonFields, num_logprobs: int | None
) -> ReplyOptions:
    return ReplyOptions(
        reply_id=f"{prefix}-{text_request.generation.request_id}",
        created=int(router.wall_clock()),
        model=router.served_model_name,
        num_choices=text_request.generation.n,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=fields.prompt_logprobs,
        echoes=text_request.echo is not None,
        has_token_ids=bool(fields.return_token_ids),
        includes_usage=fields.includes_usage,
    )


async def _respond(
    router: Router, request: Request, text_requests: list[TextRequest], fields: CommonFields, reply: Reply
) -> Response:
    """Answer, or abort the requests everywhere when the client goes away."""
    pieces = answer_together(text_requests, router.service.answer)
    if not fields.stream:
        whole = await until_disconnected(request.receive, _all(pieces))
        return JSONResponse(reply.whole(whole))
    try:  # errors until the first piece have a status of their own
        first = await until_disconnected(request.receive, anext(pieces))
    except BaseException:
        await pieces.aclose()
        raise
    return EventStream(_events(first, pieces, reply, fields.includes_usage), source=pieces)


async def _all(pieces: AsyncGenerator[Piece, None]) -> list[Piece]:
    async with aclosing(pieces):
        return [piece async for piece in pieces]


async def _events(
    first: Piece, pieces: AsyncGenerator[Piece, None], reply: Reply, includes_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The stream of an answer. An error ends it with an error event, and without [DONE]."""
    try:
        for opening in reply.opening():
            yield event(opening)
        piece = first
        if (chunk := reply.chunk(first)) is not None:
            yield event(chunk)
        async for piece in pieces:
            if (chunk := reply.chunk(piece)) is not None:
                yield event(chunk)
        if includes_usage:
            yield event(reply.usage_chunk(piece.usage))
        yield LAST_EVENT
    except SplitserveError as error:
        yield event(error_body(error))
