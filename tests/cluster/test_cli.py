"""The command line without a cluster: configuration, ports, messages, tables."""

from __future__ import annotations

import ast
import io
import os
import socket
import stat
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from cluster.background import Background
from cluster.cli_options import parse_setting, read_config
from cluster.config import ClusterConfig, load_config
from cluster.readiness import engines_in_words
from cluster.serve_failures import explain_failure
from cluster.serve_port import http_answers, with_free_port
from cluster.serve_progress import DEMO_IS_SMALL, Report, public_url, what_to_try
from cluster.serve_run import ClusterRun
from cluster.serve_state import read_state, state_file, write_start, write_state
from cluster.status import ClusterStatus, as_json, as_table, look
from protocol.errors import StartupError
from protocol.handoff import Fingerprint
from protocol.ids import Role, WorkerId, WorkerIdentity
from protocol.membership import Load, WorkerRecord


def config(**changes: object) -> ClusterConfig:
    return load_config(None, {key.replace("__", "."): value for key, value in changes.items()})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("decode.num_workers=2", ("decode.num_workers", 2)),
        ("max_model_len=null", ("max_model_len", None)),
        ("a.b=x=y", ("a.b", "x=y")),
        ("enable_prefix_caching=false", ("enable_prefix_caching", False)),
        ('prefill.resources={"host": 1}', ("prefill.resources", {"host": 1})),
    ],
)
def test_a_setting_is_a_path_and_a_yaml_value(text: str, expected: tuple[str, object]) -> None:
    assert parse_setting(text) == expected


@pytest.mark.parametrize("text", ["decode.num_workers", "=2", "a=[1"])
def test_a_malformed_setting_is_refused(text: str) -> None:
    with pytest.raises(StartupError, match="--set"):
        parse_setting(text)


def test_flags_override_the_file_and_settings_override_flags(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("model: a\nhttp: {port: 1, host: h}\nblock_size: 8\n", encoding="utf-8")
    merged = read_config(file, {"http.port": 2, "block_size": 32, "model": None}, ["block_size=64"])
    assert (merged.model, merged.http.host, merged.http.port, merged.block_size) == ("a", "h", 2, 64)


def test_a_taken_port_names_itself_and_a_way_out() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            StartupError, match=rf"port {port} on 127.0.0.1 is taken by .*--port {port + 1}"
        ):
            with_free_port(config(http__port=port))


def test_port_zero_becomes_a_real_one() -> None:
    assert with_free_port(config(http__port=0)).http.port > 0


@pytest.mark.parametrize("host", ["192.0.2.77", "no.such.host.invalid"])
def test_a_foreign_address_is_refused(host: str) -> None:
    with pytest.raises(StartupError, match="--host"):
        with_free_port(config(http__host=host, http__port=0))


def test_a_closed_port_does_not_answer() -> None:
    assert not http_answers(public_url(with_free_port(config(http__port=0))), "/ready")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),  # noqa: S104
        ("::", "http://[::1]:8000"),
        ("gpu-1", "http://gpu-1:8000"),
    ],
)
def test_the_public_url_is_one_that_a_client_here_can_use(host: str, url: str) -> None:
    assert public_url(config(http__host=host)) == url


def test_the_closing_text_holds_commands_that_work_as_they_are() -> None:
    lines = what_to_try(config(served_model_name="tiny"))
    snippet = lines[lines.index("from openai import OpenAI") :]
    ast.parse("\n".join(snippet[: snippet.index("")]))
    assert any('"model": "tiny"' in line for line in lines)
    assert DEMO_IS_SMALL in lines
    assert DEMO_IS_SMALL not in what_to_try(config(model="/models/big"))
    assert not any("Authorization" in line for line in lines)
    with_key = what_to_try(config(http__api_key_file="/etc/key"))
    assert any("Authorization: Bearer $(head -n 1 /etc/key)" in line for line in with_key)


def test_the_report_tells_the_seconds_since_its_start() -> None:
    out = io.StringIO()
    now = iter([10.0, 12.5])
    report = Report(out, lambda: next(now))
    report.step("Ray runs")
    assert out.getvalue() == "    2.5 s  Ray runs\n"


def test_the_headline_counts_the_workers_of_a_pool_that_follows_its_load() -> None:
    """`num_workers` says nothing about such a pool."""
    out = io.StringIO()
    scaling = {"decode__num_workers": 9, "decode__autoscaling__max_workers": 4}
    Report(out).headline(config(prefill__num_workers=2, **scaling))
    assert out.getvalue() == "splitserve: demo, 2 prefill + 1 to 4 decode worker(s)\n"


def test_what_is_to_be_copied_has_nothing_around_it() -> None:
    out = io.StringIO()
    Report(out).block(["a", "  b"])
    assert out.getvalue() == "\na\n  b\n\n"


SERVE_SAYS = """A replica failed to start with exception. Retrying 2 more time(s). Error:
\x1b[36mray::ServeReplica:splitserve:prefill.initialize_and_get_metadata()\x1b[39m (pid=1)
RuntimeError: Traceback (most recent call last):
  File "x.py", line 33, in failing
    raise StartupError("the model does not exist")
"""


def test_a_replicas_own_words_are_found_at_the_end_of_serves_report() -> None:
    report = SERVE_SAYS + "protocol.errors.StartupError: the model does not exist:\n  give a folder\n"
    assert explain_failure(report) == "the model does not exist:\n  give a folder"


def test_a_foreign_exception_is_its_last_line() -> None:
    assert (
        explain_failure(SERVE_SAYS + "ImportError: no module named x") == "ImportError: no module named x"
    )
    assert explain_failure("") == ""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "splitserve" / "run"


def test_the_state_file_is_for_its_owner_alone_and_of_a_living_process(run_dir: Path) -> None:
    settings = config(http__port=9)
    assert read_state(settings) is None
    path = write_state(settings, "127.0.0.1:1", ray_token="secret", cluster_token="too")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    state = read_state(settings)
    assert state is not None
    assert (state.ray_token, state.cluster_token) == ("secret", "too")
    assert "secret" not in repr(state)
    dead = path.read_text(encoding="utf-8").replace(f'"pid": {state.pid}', '"pid": 4194305')
    state_file(settings).write_text(dead, encoding="utf-8")
    assert read_state(settings) is None


def test_a_server_that_starts_is_found_whatever_its_configuration(run_dir: Path) -> None:
    """Regression: `status` denied a server that was starting, or that had another cache_dir."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = write_start(config(http__port=port, cache_dir="/elsewhere"))
    assert path.parent == run_dir
    seen = look(config(http__port=port))
    assert (seen.alive, seen.ready, seen.workers) == (False, False, ())
    assert f"demo is starting (pid {os.getpid()})" in as_table(seen)
    assert read_state(config(http__port=port)) is None


def test_a_server_of_somebody_else_is_not_denied(run_dir: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), _SaysOk) as server:
        answering = Background("server", server.serve_forever)
        seen = look(config(http__port=server.server_port))
        server.shutdown()
        assert answering.wait(10.0)
    assert (seen.alive, seen.ready) == (True, True)
    assert "--ray-address" in as_table(seen)


class _SaysOk(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_engines_are_told_once_per_kind() -> None:
    workers = [record(Role.PREFILL, "p"), record(Role.DECODE, "d"), record(Role.DECODE, "e")]
    assert engines_in_words(workers) == [
        "prefill: 1 x float32 by C++ avx2, 10 KV blocks of 16 tokens",
        "decode: 2 x float32 by C++ avx2, 10 KV blocks of 16 tokens",
    ]


def record(role: Role, worker_id: str) -> WorkerRecord:
    fingerprint = Fingerprint("m", "r", "float32", "float32", 2, 2, 16, 16)
    identity = WorkerIdentity(WorkerId(worker_id), "1")
    load = Load(num_running=2, blocks_total=10, blocks_free=7)
    return WorkerRecord(
        identity, role, "127.0.0.1:1", fingerprint, max_model_len=64, load=load, ops="C++ avx2"
    )


def test_the_table_has_a_line_per_worker_and_names_a_missing_role() -> None:
    table = as_table(ClusterStatus("http://h:1", True, False, (record(Role.DECODE, "d"),)))
    assert "alive, not ready" in table
    assert any(line.split()[:2] == ["decode", "d@1"] for line in table.splitlines())
    assert "7 of 10" in table
    assert "C++ avx2" in table
    assert table.endswith("no prefill worker lives")


def test_the_status_for_programs_is_json() -> None:
    seen = as_json(ClusterStatus("http://h:1", True, True, (record(Role.DECODE, "d"),)))
    assert '"num_workers": 1' in seen
    assert '"role": "decode"' in seen


def test_a_background_call_hands_its_error_to_who_asks() -> None:
    def fail() -> None:
        raise StartupError("no")

    background = Background("test", fail)
    assert background.wait(5.0)
    with pytest.raises(StartupError, match="no"):
        background.result()
    assert Background("test", lambda: 7).result() == 7


def test_the_fast_commands_load_neither_torch_nor_ray() -> None:
    code = (
        "import sys; import cluster.cli; from cluster.cli_options import read_config;"
        "read_config(None, {}, None);"
        "sys.exit(bool({'torch', 'ray', 'transformers', 'grpc'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_a_router_and_the_command_load_is_free_of_torch() -> None:
    """A replica that only routes must not pay 2 s and 150 MB for torch."""
    code = (
        "import sys; import cluster.compose, cluster.application, router.app, router.router;"
        "sys.exit(bool({'torch', 'transformers', 'nixl'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("command", [["status"], ["drain", "x"]])
def test_a_command_without_a_server_says_so(command: list[str], tmp_path: Path) -> None:
    splitserve = Path(sys.executable).parent / "splitserve"
    done = subprocess.run(
        [splitserve, *command, "--port", "1", "--set", f"cache_dir={tmp_path}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: no server answers at http://127.0.0.1:1")


def test_a_server_that_ends_in_haste_takes_its_word_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_start(config())
    ClusterRun(config(), Report(io.StringIO())).take_word_back()
    assert not state_file(config()).exists()
