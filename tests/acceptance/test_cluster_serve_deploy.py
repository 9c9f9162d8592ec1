"""On Ray, by a Serve config file as `serve deploy` and KubeRay apply it: updates and scaling under load."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest
from served_cluster import CLUSTER_TOKEN, Served, serving, wait_until
from served_load import LIGHT, Load, Mix, worker_ids

from cluster.config import load_config

pytestmark = [pytest.mark.ray, pytest.mark.nixl, pytest.mark.timeout(400)]

LIMIT_S = 150.0
ROLES = ("prefill", "decode")

SERVE_DEPLOY = dedent("""
    import json, sys
    from cluster.attachment import find_cluster
    from cluster.cli_options import read_config
    with find_cluster(read_config(None, {}, sys.argv[2:])).joined():
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema
        _get_global_client().deploy_apps(ServeDeploySchema(**json.loads(sys.argv[1])))
""")
"""What Ray's dashboard does with a config file that `serve deploy` sends it; ours has no dashboard."""

SCALING = {
    "max_workers": 2,
    "target_use": 0.25,
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 4.0,
}


class Deployed:
    """A cluster, and Serve config files for it."""

    def __init__(self, served: Served, model: Path, cache_dir: Path) -> None:
        self.served = served
        self._is_replaced = False
        self._arguments: dict[str, Any] = {
            "model": str(model),
            "served_model_name": "tiny",
            "cache_dir": str(cache_dir),
            "http.port": served.port,
            "router.worker_wait_s": LIMIT_S,
            "prefill.num_blocks": 200,
            "decode.num_blocks": 200,
            "decode.autoscaling": {"max_workers": 1},
        }

    def deploy(self, **changes: object) -> None:
        """With all changes so far."""
        self._arguments |= {key.replace("__", "."): value for key, value in changes.items()}
        config = load_config(None, self._arguments).model_dump(mode="json", exclude_defaults=True)
        application = {
            "name": "splitserve",
            "route_prefix": "/",
            "import_path": "cluster.application:from_arguments",
            "args": config,
            "runtime_env": {"env_vars": {"SPLITSERVE_CLUSTER_TOKEN": CLUSTER_TOKEN}},
        }
        file = json.dumps({"proxy_location": "Disabled", "applications": [application]})
        command = [sys.executable, "-c", SERVE_DEPLOY, file, f"http.port={self.served.port}"]
        subprocess.run(command, check=True, timeout=60, env=self.served.own_environment)

    def replace_everything(self) -> None:
        """The first file does: what `serve` deployed has other versions. Later calls do nothing."""
        if self._is_replaced:
            return
        workers, routers = self.workers(), self.routers()
        self.deploy()
        for role in ROLES:
            self.wait_until_replaced(role, workers)
        wait_until(lambda: len(now := self.routers()) == 1 and not now & routers, LIMIT_S, "new router")
        self._is_replaced = True

    def workers(self) -> dict[str, set[str]]:
        return {role: worker_ids(self.served, role) for role in ROLES}

    def routers(self) -> set[int]:
        found = set()
        for process in self.served.family():
            try:
                if " ".join(process.cmdline()).startswith("ray::ServeReplica:splitserve:router"):
                    found.add(process.pid)
            except psutil.Error:
                continue
        return found

    def wait_until_replaced(self, role: str, before: dict[str, set[str]]) -> None:
        def is_replaced() -> bool:
            now = worker_ids(self.served, role)
            return len(now) == len(before[role]) and not now & before[role]

        wait_until(is_replaced, LIMIT_S, f"all {role} workers are replaced")


@pytest.fixture(scope="module")
def deployed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("deployed")
    patience = f"router.worker_wait_s={LIMIT_S}"  # a pool of one has a pause while its successor starts
    follows_load = "decode.autoscaling.max_workers=1"  # switched on later, it would replace the pool
    with serving(tiny_llama, folder, "--set", patience, "--set", follows_load) as served:
        yield Deployed(served, tiny_llama, folder / "cache")


def test_an_update_of_everything_fails_no_request(deployed: Deployed) -> None:
    """The router, too: whoever has a stream there gets all of it, whoever connects finds the next one."""
    load = Load(deployed.served)
    with load.running():
        deployed.replace_everything()
    assert not load.failures
    assert load.num_answered > 0


def test_a_changed_argument_replaces_only_what_reads_it_and_fails_no_request(deployed: Deployed) -> None:
    """Serve by itself gives all deployments of a config file one version."""
    deployed.replace_everything()
    workers, routers = deployed.workers(), deployed.routers()
    load = Load(deployed.served)
    with load.running():
        deployed.deploy(decode__max_num_batched_tokens=256)
        deployed.wait_until_replaced("decode", workers)
    assert not load.failures
    assert deployed.workers()["prefill"] == workers["prefill"]
    assert deployed.routers() == routers


def test_a_step_of_load_adds_a_worker_and_its_end_drains_one(deployed: Deployed) -> None:
    """Neither the new bounds nor what follows from them replaces a worker; no request fails."""
    workers = deployed.workers()
    light = Load(deployed.served, LIGHT)
    heavy = Load(deployed.served, Mix(prompts=(250,), outputs=(120,), num_clients=5))
    with light.running():
        deployed.deploy(decode__autoscaling=SCALING)
        with heavy.running():
            wait_until(lambda: len(worker_ids(deployed.served, "decode")) == 2, LIMIT_S, "a second worker")
            assert workers["decode"] < worker_ids(deployed.served, "decode")
        wait_until(lambda: len(worker_ids(deployed.served, "decode")) == 1, LIMIT_S, "one worker again")
    assert not light.failures
    assert not heavy.failures
    assert deployed.workers()["prefill"] == workers["prefill"]
