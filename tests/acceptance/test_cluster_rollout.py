"""On Ray: rolling updates, a drain, and scaling, by our commands and by Serve's files, lose no request.

The tests share one cluster and go on with what the one before has left.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from compiled_ops import cache_folder
from rolling_cluster import AT_FIRST, LIMIT_S, ROLES, Rollout
from served_cluster import SPLITSERVE, serving, stop, wait_until
from served_load import LIGHT, RESTING, Load, Mix, worker_ids

pytestmark = [pytest.mark.ray, pytest.mark.nixl, pytest.mark.timeout(400)]

SCALING = {
    "max_workers": 2,
    "target_use": 0.25,
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 4.0,
}


@pytest.fixture(scope="module")
def rollout(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rollout]:
    folder = tmp_path_factory.mktemp("rollout")
    flags = [word for key, value in AT_FIRST.items() for word in ("--set", f"{key}={value}")]
    with serving(tiny_llama, folder, *flags) as served:
        yield Rollout(served, tiny_llama, cache_folder(folder))


def test_a_rolling_update_of_both_pools_loses_no_request(rollout: Rollout) -> None:
    before, routers = rollout.two_of_each(), rollout.routers()
    load = Load(rollout.served, RESTING)
    with load.running():
        rollout.redeploy(prefill__max_num_batched_tokens=256, decode__max_num_batched_tokens=256)
        for role in ROLES:
            rollout.wait_until_replaced(role, before)
    assert not load.failures
    assert load.num_answered > 0
    assert rollout.routers() == routers, "nothing of the router's has changed"


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
    load = Load(rollout.served, RESTING)
    with load.running():
        rollout.redeploy(prefill__num_workers=1, decode__num_workers=1)
        for role in ROLES:
            rollout.wait_until_fewer(role, before)
    assert not load.failures


def test_a_file_that_updates_everything_fails_no_request(rollout: Rollout) -> None:
    """What our commands deployed has other versions, the router too: whoever has a stream there gets all
    of it, whoever connects finds the next one. That pools follow their load, as one does from here on,
    cannot be switched on without replacing them."""
    workers, routers = rollout.workers(), rollout.routers()
    load = Load(rollout.served, RESTING)
    with load.running():
        rollout.deploy_file(decode__autoscaling={"max_workers": 1})
        for role in ROLES:
            rollout.wait_until_replaced(role, workers)
        rollout.wait_until_router_replaced(routers)
    assert not load.failures
    assert load.num_answered > 0


def test_a_changed_argument_replaces_only_what_reads_it_and_fails_no_request(rollout: Rollout) -> None:
    """Serve by itself gives all deployments of a config file one version."""
    workers, routers = rollout.workers(), rollout.routers()
    load = Load(rollout.served, RESTING)
    with load.running():
        rollout.deploy_file(decode__max_num_batched_tokens=192)
        rollout.wait_until_replaced("decode", workers)
    assert not load.failures
    assert rollout.workers()["prefill"] == workers["prefill"]
    assert rollout.routers() == routers


def test_a_step_of_load_adds_a_worker_and_its_end_drains_one(rollout: Rollout) -> None:
    """Neither the new bounds nor what follows from them replaces a worker; no request fails."""
    workers = rollout.workers()
    light = Load(rollout.served, LIGHT)
    heavy = Load(rollout.served, Mix(prompts=(250,), outputs=(120,), num_clients=5))
    with light.running():
        rollout.deploy_file(decode__autoscaling=SCALING)
        with heavy.running():
            wait_until(lambda: len(worker_ids(rollout.served, "decode")) == 2, LIMIT_S, "a second worker")
            assert workers["decode"] < worker_ids(rollout.served, "decode")
        wait_until(lambda: len(worker_ids(rollout.served, "decode")) == 1, LIMIT_S, "one worker again")
    assert not light.failures
    assert not heavy.failures
    assert rollout.workers()["prefill"] == workers["prefill"]


def test_the_end_of_all_waits_for_no_drain(rollout: Rollout) -> None:
    """Workers may drain for a minute; Ctrl-C means now. Last in this file: it ends the cluster."""
    load = Load(rollout.served)
    with load.running():
        wait_until(lambda: load.num_answered > 0, LIMIT_S, "requests run")
        stop(rollout.served, signal.SIGINT, limit_s=20)
