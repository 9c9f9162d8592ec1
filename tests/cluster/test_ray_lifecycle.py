"""`splitserve serve` starts, refuses to start, and ends; in each case nothing is left of it."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
from served_cluster import LOOPBACK, assert_gone, serving, stop

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_a_taken_port_is_refused_before_anything_is_started(tiny_llama: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with serving(tiny_llama, tmp_path, ready=False, port=port) as served:
            assert served.wait_for_end(30) == 1
            assert f"port {port} on 127.0.0.1 is taken" in served.output()
            assert f"--port {port + 1}" in served.output()
            assert len(served.output().splitlines()) == 1


def test_a_missing_model_is_one_clear_line(tmp_path: Path) -> None:
    with serving(tmp_path / "nowhere", tmp_path, ready=False) as served:
        assert served.wait_for_end(90) == 1
        assert served.output().splitlines()[-1].startswith("error: there is no model at")
        assert "Traceback" not in served.output()


def test_a_worker_that_cannot_start_says_why_in_its_own_words(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(tiny_llama, tmp_path, "--set", "decode.num_blocks=1000000000", ready=False) as served:
        assert served.wait_for_end(150) == 1
        assert "error: decode cannot start: " in served.output()
        assert "lower their number or the KV cache's memory" in served.output()
        assert "Traceback" not in served.output()


def test_a_signal_during_the_start_ends_everything(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(tiny_llama, tmp_path, ready=False) as served:
        served.wait_for("Ray runs")
        assert "is starting" in served.status_text()
        stop(served, signal.SIGINT)
        assert served.process.returncode == 130
        assert served.output().splitlines()[-1].endswith("stopped")


def test_a_server_behind_serves_proxy_answers_and_ends_within_fifteen_seconds(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with serving(tiny_llama, tmp_path, "--set", "http.through=proxy") as served:
        assert served.complete()["usage"]["completion_tokens"] == 8
        assert served.listening_addresses() <= LOOPBACK
        stop(served, signal.SIGTERM, limit_s=15)
        assert served.process.returncode == 0
        with socket.socket() as again:
            again.bind(("127.0.0.1", served.port))
        assert not list((tmp_path / "home" / "splitserve" / "run").iterdir())


def test_a_killed_server_takes_ray_with_it(tiny_llama: Path, tmp_path: Path) -> None:
    """kill -9 of the command itself: the kernel ends Ray's daemons, and they their workers.

    Ray's two agents first spend a minute trying to report the death to the dead. A worker that Ray was just
    starting, which no look at the family has seen yet, ends when it finds no raylet to report to.
    """
    with serving(tiny_llama, tmp_path, ready=False) as served:
        served.wait_for("Ray runs")
        family = [p for p in served.family() if not p.name().endswith("Agent")]
        served.process.kill()
        served.process.wait(timeout=10)
        assert_gone(served, family, limit_s=60.0)
