"""A real `splitserve serve` in a process of its own, and a look at what it leaves behind."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from compiled_ops import cache_folder

SPLITSERVE = Path(sys.executable).parent / "splitserve"
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
START_LIMIT_S = 150.0
CLUSTER_TOKEN = "known-to-this-test-alone"  # noqa: S105


@dataclass
class Served:
    """One running `splitserve serve`."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    environment: dict[str, str]

    @property
    def own_environment(self) -> dict[str, str]:
        """In which commands find this server."""
        return {**os.environ, **self.environment}

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def wait_for(self, text: str, limit_s: float = START_LIMIT_S) -> None:
        """Until the output holds `text`; fails when the process ends before."""
        wait_until(lambda: text in self.output() or self.process.poll() is not None, limit_s, text)
        assert text in self.output(), self.output()

    def wait_for_end(self, limit_s: float) -> int:
        return self.process.wait(timeout=limit_s)

    def request(
        self, method: str, path: str, body: Any = None, timeout_s: float = 30.0
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            headers = {"content-type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def complete(
        self, prompt: str = "hello", max_tokens: int = 8, timeout_s: float = 30.0
    ) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        status, answer = self.request("POST", "/v1/completions", body, timeout_s)
        assert status == 200, answer
        reply: dict[str, Any] = json.loads(answer)
        return reply

    def family(self) -> list[psutil.Process]:
        """The process and all that descend from it."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def member(self, title: str) -> psutil.Process:
        """The one process whose title starts with `title`."""
        found = [p for p in self.family() if _title(p).startswith(title)]
        assert len(found) == 1, [_title(p) for p in self.family()]
        return found[0]

    def listening_addresses(self) -> set[str]:
        """All addresses that any process of the cluster listens on."""
        found = {
            connection.laddr.ip
            for process in self.family()
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert found
        return found

    def status(self) -> dict[str, Any]:
        """What `splitserve status --json` says."""
        seen: dict[str, Any] = json.loads(self.status_text("--json") or "{}")
        return seen

    def status_text(self, *options: str) -> str:
        done = subprocess.run(
            [SPLITSERVE, "status", "--port", str(self.port), *options],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=self.own_environment,
        )
        return done.stdout


@contextmanager
def serving(
    model: Path, folder: Path, *arguments: str, ready: bool = True, port: int = 0
) -> Iterator[Served]:
    """Start a cluster of small pools; on the way out it is stopped, and nothing may be left of it."""
    port = port or free_port()
    settings = ["--set", f"cache_dir={cache_folder(folder)}"]
    command = [SPLITSERVE, "serve", model, "--served-model-name", "tiny", "--port", str(port), *settings]
    command += ["--set", "prefill.num_blocks=200", "--set", "decode.num_blocks=200", *arguments]
    log = folder / f"serve-{port}.log"
    home = {"XDG_CACHE_HOME": str(folder / "home")}
    environment = {**os.environ, **home, "SPLITSERVE_CLUSTER_TOKEN": CLUSTER_TOKEN}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    served = Served(process, port, log, home)
    try:
        if ready:
            served.wait_for("Ready:")
        yield served
    finally:
        stop(served)


def stop(served: Served, number: int = signal.SIGTERM, limit_s: float = 30.0) -> None:
    """Stop it and see that no process of it is left."""
    family = served.family() if served.process.poll() is None else []
    if family:
        served.process.send_signal(number)
        served.process.wait(timeout=limit_s)
    assert_gone(served, family)


def assert_gone(served: Served, family: list[psutil.Process], limit_s: float = 2.0) -> None:
    """Within `limit_s` none of `family` lives, nor anything else of this server's Ray session."""
    _, alive = psutil.wait_procs([*family, *_of_session(served)], timeout=limit_s)
    left = [*alive, *_of_session(served)]
    assert not left, [_argv(p) for p in left]


def _of_session(served: Served) -> list[psutil.Process]:
    session = f"_{served.process.pid}/"
    return [p for p in psutil.process_iter() if any("session_" in a and session in a for a in _argv(p))]


def wait_until(condition: Callable[[], bool], limit_s: float, label: str) -> float:
    """Seconds until `condition` held; fails after `limit_s`."""
    started_at = time.monotonic()
    while not condition():
        assert time.monotonic() < started_at + limit_s, f"{label}: not within {limit_s} s"
        time.sleep(0.1)
    return time.monotonic() - started_at


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _argv(process: psutil.Process) -> list[str]:
    try:
        argv: list[str] = process.cmdline()
    except psutil.Error:
        return []
    return argv


def _title(process: psutil.Process) -> str:
    return " ".join(_argv(process)).strip()
