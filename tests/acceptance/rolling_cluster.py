"""A cluster on Ray with two workers of each role, and new configurations for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
from served_cluster import CLUSTER_TOKEN, Served, wait_until
from served_load import worker_ids

from cluster.config import load_config

LIMIT_S = 150.0
ROLES = ("prefill", "decode")
AT_FIRST = {
    "prefill.num_workers": 2,
    "decode.num_workers": 2,
    "prefill.num_blocks": 200,
    "decode.num_blocks": 200,
    "router.worker_wait_s": LIMIT_S,  # a pool of one has a pause while its successor starts
}

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


class Rollout:
    """Changes add up: each deployment has all of those before it."""

    def __init__(self, served: Served, model: Path, cache_dir: Path) -> None:
        self.served = served
        self._arguments: dict[str, Any] = {
            **AT_FIRST,
            "model": str(model),
            "served_model_name": "tiny",
            "cache_dir": str(cache_dir),
            "http.port": served.port,
        }

    def redeploy(self, **changes: object) -> None:
        """As our own commands do."""
        self._change(changes)
        self._run(REDEPLOY, *(f"{key}={value}" for key, value in self._arguments.items()))

    def deploy_file(self, **changes: object) -> None:
        """As `serve deploy` and KubeRay do."""
        self._change(changes)
        config = load_config(None, self._arguments).model_dump(mode="json", exclude_defaults=True)
        application = {
            "name": "splitserve",
            "route_prefix": "/",
            "import_path": "cluster.application:from_arguments",
            "args": config,
            "runtime_env": {"env_vars": {"SPLITSERVE_CLUSTER_TOKEN": CLUSTER_TOKEN}},
        }
        file = json.dumps({"proxy_location": "Disabled", "applications": [application]})
        self._run(SERVE_DEPLOY, file, f"http.port={self.served.port}")

    def workers(self) -> dict[str, set[str]]:
        """Their ids by role."""
        return {role: worker_ids(self.served, role) for role in ROLES}

    def two_of_each(self) -> dict[str, set[str]]:
        """As `workers`, once there are two of each."""
        for role in ROLES:
            self._wait(role, lambda now: len(now) == 2, f"two {role} workers")
        return self.workers()

    def routers(self) -> set[int]:
        """The ids of their processes."""
        found = set()
        for process in self.served.family():
            try:
                if " ".join(process.cmdline()).startswith("ray::ServeReplica:splitserve:router"):
                    found.add(process.pid)
            except psutil.Error:
                continue
        return found

    def wait_until_replaced(self, role: str, before: dict[str, set[str]]) -> None:
        num_workers = self._arguments[f"{role}.num_workers"]
        self._wait(
            role,
            lambda now: len(now) == num_workers and not now & before[role],
            f"all {role} workers are replaced",
        )

    def wait_until_fewer(self, role: str, before: dict[str, set[str]]) -> None:
        self._wait(role, lambda now: len(now) == 1 and now < before[role], f"one {role} worker is left")

    def wait_until_router_replaced(self, before: set[int]) -> None:
        wait_until(lambda: len(now := self.routers()) == 1 and not now & before, LIMIT_S, "a new router")

    def _wait(self, role: str, is_right: Callable[[set[str]], bool], label: str) -> None:
        wait_until(lambda: is_right(worker_ids(self.served, role)), LIMIT_S, label)

    def _change(self, changes: dict[str, object]) -> None:
        self._arguments |= {key.replace("__", "."): value for key, value in changes.items()}

    def _run(self, program: str, *arguments: str) -> None:
        command = [sys.executable, "-c", program, *arguments]
        subprocess.run(command, check=True, timeout=120, env=self.served.own_environment)
