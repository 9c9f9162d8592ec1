"""Ask a running server, through its public API, for token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from cluster.verification.cases import Case
from protocol.errors import StartupError, WorkerUnavailable

REQUEST_TIMEOUT_S = 600.0
MAX_CONCURRENT = 16
FIRST_TIMEOUT_S = 10.0
"""Until the answer to the first, small question."""


def base_url(url: str) -> str:
    """Without the /v1 that clients of OpenAI's API are given. Raises `StartupError`."""
    if not url.startswith(("http://", "https://")):
        raise StartupError(f"--url {url!r} must begin with http:// or https://")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def ask_model(url: str, api_key: str | None = None) -> str:
    """The name of the model that a server serves. Raises `WorkerUnavailable` when it does not say."""
    try:
        response = httpx.get(f"{url}/v1/models", headers=_headers(api_key), timeout=FIRST_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise WorkerUnavailable(f"{url} does not answer: {error}") from error
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise WorkerUnavailable(f"{url} asks for a key: name its file with --api-key-file")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise WorkerUnavailable(
            f"{url}/v1/models answered {response.status_code} and names no model"
        ) from error


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


class RemoteCluster:
    """A server at a base URL such as http://127.0.0.1:8000."""

    def __init__(self, url: str, model: str, api_key: str | None = None) -> None:
        self._url = url
        self._model = model
        self._headers = _headers(api_key)
        self._places = asyncio.Semaphore(MAX_CONCURRENT)

    async def answer(self, cases: Sequence[Case]) -> list[list[int]]:
        """Output token ids of all cases. Raises `WorkerUnavailable` when the server does not answer."""
        async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, headers=self._headers) as client:
            return list(await asyncio.gather(*(self._answer(client, case) for case in cases)))

    async def _answer(self, client: httpx.AsyncClient, case: Case) -> list[int]:
        sampling = case.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(case.prompt_token_ids),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": sampling.seed,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "logit_bias": {str(token): bias for token, bias in sampling.logit_bias},
            "min_tokens": sampling.min_tokens,
            "return_token_ids": True,
        }
        async with self._places:
            try:
                response = await client.post(f"{self._url}/v1/completions", json=body)
            except httpx.HTTPError as error:
                raise WorkerUnavailable(f"{self._url} does not answer: {error}") from error
        if response.status_code != httpx.codes.OK:
            raise WorkerUnavailable(f"{self._url} answered {response.status_code}: {response.text[:500]}")
        token_ids: list[int] = response.json()["choices"][0]["token_ids"]
        return token_ids
