"""Clients of a real `splitserve serve`, and what they were refused."""

from __future__ import annotations

import http.client
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from served_cluster import Served


@dataclass(frozen=True, slots=True)
class Mix:
    """What the clients ask for, by lengths in tokens; each request is one of them."""

    prompts: tuple[int, ...] = (5, 60, 250)
    outputs: tuple[int, ...] = (4, 40, 120)
    num_clients: int = 4
    rest: float = 0.0
    """A client's pause after each answer, as a share of the time that it took, up to a second."""


LIGHT = Mix(prompts=(5,), outputs=(4,), num_clients=1)
RESTING = Mix(rest=1.0)
"""Leaves half of a small machine to the workers that start meanwhile."""


class Load:
    """Clients that ask one request after the other, every other one as a stream, until they are told to
    stop. Each must get what it asked for, to the last token."""

    def __init__(self, served: Served, mix: Mix | None = None) -> None:
        self._served = served
        self._mix = mix or Mix()
        self._is_over = threading.Event()
        clients = range(self._mix.num_clients)
        self._threads = [threading.Thread(target=self._ask_all, args=[i]) for i in clients]
        self.num_answered = 0
        self.failures: list[str] = []

    def _ask_all(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._is_over.is_set():
            asked_at = time.monotonic()
            try:
                problem = self._ask(rng)
            except (OSError, http.client.HTTPException) as error:
                problem = repr(error)
            if problem:
                self.failures.append(problem)
                self._is_over.wait(0.1)
            self.num_answered += 1
            self._is_over.wait(min(self._mix.rest * (time.monotonic() - asked_at), 1.0))

    def _ask(self, rng: random.Random) -> str | None:
        num_tokens = rng.choice(self._mix.outputs)
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": [3 + rng.randrange(250) for _ in range(rng.choice(self._mix.prompts))],
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": bool(rng.randrange(2)),
        }
        status, answer = self._served.request("POST", "/v1/completions", body, timeout_s=120)
        if status != 200:
            return f"{status}: {answer!r}"
        got = len(_streamed(answer) if body["stream"] else _token_ids(json.loads(answer)))
        return None if got == num_tokens else f"{got} of {num_tokens} tokens: {answer[-300:]!r}"

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in self._threads:
                thread.join()


def _token_ids(answer: dict[str, Any]) -> list[int]:
    return [token for choice in answer.get("choices", ()) for token in choice.get("token_ids") or ()]


def _streamed(answer: bytes) -> list[int]:
    """The tokens of a stream; none when it did not end well."""
    events = [line.removeprefix("data: ") for line in answer.decode().split("\n") if line]
    if not events or events[-1] != "[DONE]":
        return []
    return [token for event in events[:-1] for token in _token_ids(json.loads(event))]


def worker_ids(served: Served, role: str) -> set[str]:
    """Ids of the workers that the router is connected to. Costs less than `splitserve status`."""
    try:
        page = served.request("GET", "/metrics")[1].decode()
    except OSError:
        return set()
    lines = (line for line in page.splitlines() if f'role="{role}"' in line)
    return {found[1] for line in lines if (found := re.search(r'worker_id="([^"]+)"', line))}
