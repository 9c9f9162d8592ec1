"""Which shell commands set a host up for `ray up`, and start Ray there?

Ray runs each of them as `bash --login -c -i 'source ~/.bashrc && export OMP_NUM_THREADS=1 ... && (...)'`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.deploy_ray_up import RayUp
from cluster.environment import FINDS_LOST_HOSTS

PORT = 6379
NUM_ATTEMPTS = 5
ENVIRONMENT_FOLDER = "~/splitserve-env"
PACKAGE = "~/splitserve-package"
PINS = "~/splitserve-pins.txt"
EVERYWHERE = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray starts its workers 15 nice levels down: next to anything else they would starve.
    "RAY_worker_niceness": "0",
}


def file_mounts(ray_up: RayUp) -> dict[str, str]:
    """What is copied to every host: path there to path here."""
    mounts = {
        "~/.ray/auth_token": str(ray_up.auth_token_file),
        "~/splitserve.yaml": str(ray_up.config_file),
    }
    if ray_up.package is not None:
        mounts[_package_there(ray_up.package)] = str(ray_up.package)
    if ray_up.package is not None and ray_up.pins is not None:
        mounts[PINS] = str(ray_up.pins)
    return mounts | ray_up.file_mounts


def setup_commands(ray_up: RayUp) -> list[str]:
    """What is run on every new host: the user's own commands, then the installation."""
    commands = list(ray_up.setup_commands)
    path = ""
    if ray_up.package is not None:
        pins = f" -c {PINS}" if ray_up.pins is not None else ""
        commands.append(f"python3 -m venv {ENVIRONMENT_FOLDER}")
        commands.append(f"{ENVIRONMENT_FOLDER}/bin/pip install -q{pins} {_package_there(ray_up.package)}")
        path = f" PATH={ENVIRONMENT_FOLDER}/bin:$PATH"
    line = f"export RAY_AUTH_MODE=token{path}"
    commands.append(f"grep -qxF '{line}' ~/.bashrc || echo '{line}' >> ~/.bashrc")
    return commands


def start_head(config: ClusterConfig) -> list[str]:
    """The head node computes nothing: no CPUs, no GPUs."""
    ray_up = config.deploy.ray_up
    local = ray_up.provider == "local"
    variables = FINDS_LOST_HOSTS | ({"RAY_enable_autoscaler_v2": "0"} if local else {})
    address = f" --node-ip-address={ray_up.head.host}" if local else ""
    dashboard = "" if ray_up.dashboard else " --include-dashboard=false"
    return [
        "ray stop",
        _prepare(ray_up, variables)
        + f"ray start --head{address} --port={PORT} --num-cpus=0 --num-gpus=0{dashboard}"
        f" {_object_store(config)} --autoscaling-config=~/ray_bootstrap_config.yaml",
    ]


def start_worker(config: ClusterConfig, resources: Mapping[str, Mapping[str, int]]) -> list[str]:
    """`resources`: what each host offers, by host; empty where Ray knows it from the kind of node."""
    offers = ' --resources="$resources"' if resources else ""
    return [
        "ray stop",
        _which_host(resources)
        + _prepare(config.deploy.ray_up, {})
        + _tried_again(f"ray start --address=$RAY_HEAD_IP:{PORT} {_object_store(config)}{offers}"),
    ]


def _tried_again(command: str) -> str:
    """Ray's autoscaler gives a host up for good whose start has failed once, be it for a busy minute."""
    attempts = " ".join(map(str, range(1, NUM_ATTEMPTS + 1)))
    return (
        f"for attempt in {attempts}; do\n  {command} && exit 0\n  ray stop --force; sleep 5\ndone\nexit 1"
    )


def _which_host(resources: Mapping[str, Mapping[str, int]]) -> str:
    """Sets `resources` in the shell; all hosts get the same commands."""
    if not resources:
        return ""
    cases = [
        f"  *' {host} '*) resources={shlex.quote(json.dumps(dict(offers)))} ;;\n"
        for host, offers in resources.items()
    ]
    return (
        'case " $(hostname -I) $(hostname) $(hostname -f) " in\n'
        + "".join(cases)
        + '  *) echo "not one of the hosts in this file: $(hostname) $(hostname -I)" >&2; exit 1 ;;\n'
        + "esac\n"
    )


def _prepare(ray_up: RayUp, variables: Mapping[str, str]) -> str:
    """Ray's ssh exports OMP_NUM_THREADS=1, and each worker would compute with one thread."""
    exports = EVERYWHERE | dict(variables) | ray_up.environment
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in exports.items())
    return f"unset OMP_NUM_THREADS; ulimit -n 65535 || true\nexport {words}\n"


def _object_store(config: ClusterConfig) -> str:
    return f"--object-store-memory={config.ray.object_store_bytes}"


def _package_there(package: Path) -> str:
    return f"{PACKAGE}/{package.name}" if package.suffix == ".whl" else PACKAGE
