"""On Ray: a rolling update, a drain by command and a scale-down lose no request under load."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from served_cluster import SPLITSERVE, Served, serving, stop, wait_until
from served_load import Load, worker_ids

pytestmark = [pytest.mark.ray, pytest.mark.nixl, pytest.mark.timeout(400)]

ROLES = ("prefill", "decode")
REPLACED_S = 150.0

REDEPLOY = dedent("""
    import sys
    from cluster.attachment import find_cluster
    from cluster.cli_options import read_config
    config = read_config(None, {}, sys.argv[1:])
    cluster = find_cluster(config)
    with cluster.joined():
        from cluster.application import build_application, deploy
        deploy(build_application(config, cluster.cluster_token))
""")
"""What a new configuration comes to, whoever hands it to Serve."""


class Rollout:
    """A cluster with two workers of each role, and new configurations for it."""

    def __init__(self, served: Served, settings: list[str]) -> None:
        self.served = served
        self._settings = settings

    def redeploy(self, *changes: str) -> None:
        settings = [*self._settings, f"http.port={self.served.port}", *changes]
        command = [sys.executable, "-c", REDEPLOY, *settings]
        subprocess.run(command, check=True, timeout=60, env=self.served.own_environment)

    def workers(self, role: str) -> set[str]:
        return worker_ids(self.served, role)

    def two_of_each(self) -> dict[str, set[str]]:
        """The ids by role, once there are two of each."""
        for role in ROLES:
            wait_until(lambda role=role: len(self.workers(role)) == 2, REPLACED_S, f"two {role} workers")
        return {role: self.workers(role) for role in ROLES}

    def wait_until_replaced(self, role: str, before: set[str], num_workers: int) -> None:
        def is_replaced() -> bool:
            now = self.workers(role)
            return len(now) == num_workers and not now & before

        wait_until(is_replaced, REPLACED_S, f"all {role} workers are replaced")

    def wait_until_fewer(self, role: str, before: set[str]) -> None:
        def are_fewer() -> bool:
            now = self.workers(role)
            return len(now) == 1 and now < before

        wait_until(are_fewer, REPLACED_S, f"one of the {role} workers is left")


@pytest.fixture(scope="module")
def rollout(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rollout]:
    folder = tmp_path_factory.mktemp("rollout")
    settings = ["prefill.num_workers=2", "decode.num_workers=2"]
    flags = [word for setting in settings for word in ("--set", setting)]
    settings += [f"model={tiny_llama}", "served_model_name=tiny", f"cache_dir={folder / 'cache'}"]
    settings += ["prefill.num_blocks=200", "decode.num_blocks=200"]
    with serving(tiny_llama, folder, *flags) as served:
        yield Rollout(served, settings)


def test_a_rolling_update_of_both_pools_loses_no_request(rollout: Rollout) -> None:
    before = rollout.two_of_each()
    router = rollout.served.member("ray::ServeReplica:splitserve:router")
    load = Load(rollout.served)
    with load.running():
        rollout.redeploy("prefill.max_num_batched_tokens=256", "decode.max_num_batched_tokens=256")
        for role in ROLES:
            rollout.wait_until_replaced(role, before[role], 2)
    assert not load.failures
    assert load.num_answered > 0
    assert router.is_running(), "nothing of the router's has changed"


def test_a_drained_worker_is_replaced_and_loses_no_request(rollout: Rollout) -> None:
    victim = min(rollout.two_of_each()["decode"])
    load = Load(rollout.served)
    with load.running():
        command = [SPLITSERVE, "drain", victim[: len(victim) - 2], "--limit", "20"]
        command += ["--port", str(rollout.served.port)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=rollout.served.own_environment,
        )
        assert victim not in rollout.two_of_each()["decode"]
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{victim}@")
    assert "gone" in done.stdout.splitlines()[-1]
    assert not load.failures


def test_a_scale_down_of_both_pools_loses_no_request(rollout: Rollout) -> None:
    before = rollout.two_of_each()
    load = Load(rollout.served)
    with load.running():
        same = ("prefill.max_num_batched_tokens=256", "decode.max_num_batched_tokens=256")
        rollout.redeploy(*same, "prefill.num_workers=1", "decode.num_workers=1")
        for role in ROLES:
            rollout.wait_until_fewer(role, before[role])
    assert not load.failures


def test_the_end_of_all_waits_for_no_drain(rollout: Rollout) -> None:
    """Workers may drain for a minute; Ctrl-C means now. Last in this file: it ends the cluster."""
    load = Load(rollout.served)
    with load.running():
        wait_until(lambda: load.num_answered > 0, REPLACED_S, "requests run")
        stop(rollout.served, signal.SIGINT, limit_s=20)
