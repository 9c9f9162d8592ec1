"""`ray up` on three hosts: it serves, heals, is updated, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from compiled_ops import cache_folder
from machines import REPOSITORY, Machine, machines, obstacle
from served_cluster import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.ray, pytest.mark.nixl, pytest.mark.timeout(1200)]

BIN = Path(sys.executable).parent
PORT = 8000
UP_S = 300.0
DEPLOY_S = 300.0
RECOVERY_S = 240.0
"""All bounds are for machines with other work to do; on an idle one a quarter is enough."""
MODEL = "tiny"
ON_HOSTS = {"PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
OVER_TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"}
IMPATIENT = {"AUTOSCALER_HEARTBEAT_TIMEOUT_S": "10", "AUTOSCALER_UPDATE_INTERVAL_S": "2"}
"""A host without Ray is missed after 10 s instead of 30."""


class Laptop:
    """Where `ray up` is called: a folder with the configuration and the secrets, and a home of its own."""

    def __init__(self, folder: Path, model: Path, hosts: dict[str, Machine]) -> None:
        self.folder = folder
        self.head = hosts["head"]
        self.url = f"http://{self.head.address}:{PORT}"
        (folder / "token").write_text(secrets.token_hex(32), encoding="ascii")
        document = configuration(folder, model, hosts)
        (folder / "splitserve.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")

    def call(self, program: str, *arguments: str, limit_s: float = 120.0) -> str:
        """What a command prints, errors too; fails when it does, and says how long it took."""
        started_at = time.monotonic()
        done = subprocess.run(
            [BIN / program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
            cwd=self.folder,
            env={**os.environ, "HOME": str(self.folder), "TMPDIR": str(self.folder)},
        )
        tell(f"{program} {' '.join(arguments[:2])}", started_at)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def on_head(self, command: str, limit_s: float = 120.0) -> str:
        return self.call("ray", "exec", "ray-up.yaml", command, limit_s=limit_s)

    def ask(self, path: str, body: dict[str, Any], timeout_s: float = 30.0) -> dict[str, Any]:
        response = httpx.post(f"{self.url}{path}", json={"model": MODEL, **body}, timeout=timeout_s)
        assert response.status_code == 200, response.text
        reply: dict[str, Any] = response.json()
        return reply

    def complete(self) -> list[int]:
        body = {"prompt": [7, 8, 9] * 40, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        token_ids: list[int] = self.ask("/v1/completions", body)["choices"][0]["token_ids"]
        return token_ids

    def answers(self) -> bool:
        try:
            self.complete()
        except (httpx.HTTPError, AssertionError):
            return False
        return True

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def workers(self) -> dict[str, str]:
        """Their names by role, as `splitserve status` tells on the head node."""
        said = self.on_head(f"splitserve status --json --port {PORT} || true")
        seen = json.loads(said[said.index("{") : said.rindex("}") + 1])
        return {w["role"]: w["identity"]["worker_id"] for w in seen["workers"]}


def configuration(folder: Path, model: Path, hosts: dict[str, Machine]) -> dict[str, Any]:
    pool = {"num_blocks": 200, "threads": 1}
    return {
        "model": str(model),
        "served_model_name": MODEL,
        "dtype": "float32",
        "cache_dir": str(cache_folder(folder)),
        "drain_limit_s": 5,
        "prefill": dict(pool),
        "decode": dict(pool),
        "deploy": {
            "name": f"hosts-{os.getpid()}",
            "ray_up": {
                "ssh_user": "root",
                "ssh_private_key": str(hosts["head"].key),
                "auth_token_file": "token",
                "dashboard": False,
                "environment": OVER_TCP | IMPATIENT,
                "head": {"host": hosts["head"].address},
                "prefill": {"hosts": [hosts["prefill-0"].address]},
                "decode": {"hosts": [hosts["decode-0"].address]},
            },
        },
    }


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    if reason := obstacle():
        pytest.skip(reason)
    with machines(["head", "prefill-0", "decode-0"], tmp_path / "hosts", ON_HOSTS) as running:
        yield running


def test_ray_up_serves_heals_and_leaves_nothing(
    hosts: dict[str, Machine], tiny_llama: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "laptop"
    folder.mkdir()
    laptop = Laptop(folder, tiny_llama, hosts)
    laptop.call("splitserve", "render", "ray-up", "--config", "splitserve.yaml", "-o", ".")
    laptop.call("ray", "up", "-y", "--no-config-cache", "ray-up.yaml", limit_s=UP_S)
    with ended(laptop, hosts):
        started_at = time.monotonic()
        said = laptop.on_head("splitserve deploy --config ~/splitserve.yaml", limit_s=DEPLOY_S)
        print(said)
        assert "ready: a hand-off from prefill to decode succeeded" in said
        golden = check_answers(laptop, hosts)
        tell("deploy, status, chat and verify", started_at)
        check_update_keeps_workers(laptop)
        check_lost_prefill_host(laptop, hosts, golden)
        check_lost_decode_host(laptop, hosts, golden)
        said = laptop.on_head("splitserve undeploy --config ~/splitserve.yaml")
        assert "gone; the Ray cluster runs on" in said


def check_answers(laptop: Laptop, hosts: dict[str, Machine]) -> list[int]:
    """A chat and a completion are answered with KV that went from host to host, and `verify` agrees."""
    before = hosts["prefill-0"].host.num_sent_bytes()
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    assert laptop.ask("/v1/chat/completions", chat)["usage"]["completion_tokens"] >= 1
    golden = laptop.complete()
    assert set(laptop.workers()) == {"prefill", "decode"}
    verify = ["--config", "splitserve.yaml", "--url", laptop.url, "--prompts", "6", "--max-tokens", "16"]
    assert "all equal" in laptop.call("splitserve", "verify", *verify, limit_s=240)
    sent_bytes = hosts["prefill-0"].host.num_sent_bytes() - before
    fetched_bytes = kv_bytes(laptop)
    print(f"{fetched_bytes:,.0f} bytes of KV fetched; {sent_bytes:,} bytes left the prefill host")
    assert 0 < fetched_bytes < sent_bytes
    return golden


def kv_bytes(laptop: Laptop) -> float:
    """Fetched by decode workers so far."""
    lines = httpx.get(f"{laptop.url}/metrics", timeout=10).text.splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith("splitserve_kv_transfer_bytes_total"))


def check_update_keeps_workers(laptop: Laptop) -> None:
    said = laptop.on_head("splitserve deploy --config ~/splitserve.yaml", limit_s=DEPLOY_S)
    print(said)
    assert "prefill: 1 run on, 0 new" in said
    assert "decode: 1 run on, 0 new" in said


def check_lost_prefill_host(laptop: Laptop, hosts: dict[str, Machine], golden: list[int]) -> None:
    """Decode workers compute prompts until Ray runs there again."""
    lost_at = kill_raylet(hosts["prefill-0"])
    took_s = wait_until(laptop.answers, 30, "an answer without a prefill host")
    print(f"raylet of the prefill host killed: answered {took_s:.1f} s later")
    assert laptop.complete() == golden
    wait_until(lambda: has_raylet(hosts["prefill-0"], lost_at), RECOVERY_S, "Ray on the prefill host")
    wait_until(laptop.is_ready, RECOVERY_S, "hand-offs succeed again")
    tell("the prefill host is back, since the kill", lost_at)
    assert laptop.complete() == golden


def check_lost_decode_host(laptop: Laptop, hosts: dict[str, Machine], golden: list[int]) -> None:
    """There is no other one: requests wait until Ray runs there again, or are told to come back."""
    lost_at = kill_raylet(hosts["decode-0"])
    wait_until(lambda: has_raylet(hosts["decode-0"], lost_at), RECOVERY_S, "Ray on the decode host")
    wait_until(lambda: laptop.is_ready() and laptop.answers(), RECOVERY_S, "answers again")
    tell("the decode host is back, since the kill", lost_at)
    assert laptop.complete() == golden


def kill_raylet(machine: Machine) -> float:
    """When it was done."""
    os.kill(machine.process("raylet").pid, signal.SIGKILL)
    return time.monotonic()


def has_raylet(machine: Machine, killed_at: float) -> bool:
    born_at = [time.monotonic() - (time.time() - p.create_time()) for p in machine.named("raylet")]
    return any(born > killed_at for born in born_at)


@contextmanager
def ended(laptop: Laptop, hosts: dict[str, Machine]) -> Iterator[None]:
    """`ray down` at the end, then what it leaves on the other hosts; nothing may be left anywhere."""
    try:
        yield
    except BaseException:
        print_logs(hosts["head"])
        raise
    laptop.call("ray", "down", "-y", "ray-up.yaml")
    for name in ("prefill-0", "decode-0"):
        hosts[name].run("ray stop --force")
    wait_until(lambda: not leftovers(hosts), 15, "all processes are gone")


def leftovers(hosts: dict[str, Machine]) -> list[list[str]]:
    return [p.cmdline() for machine in hosts.values() for p in machine.processes() if p.is_running()]


def print_logs(head: Machine) -> None:
    command = "tail -n 60 /tmp/ray/session_latest/logs/monitor.out; splitserve status || true; ray status"
    try:
        print(head.run(command))
    except (AssertionError, subprocess.TimeoutExpired) as error:
        print(error)


def tell(what: str, started_at: float) -> None:
    print(f"{what}: {time.monotonic() - started_at:.1f} s")
