"""What does `ray up` get? One YAML file with what each part is for, and what would go wrong without it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.config import ClusterConfig
from cluster.deploy_ray_up import RayUp
from cluster.rendering.clustered import clustered
from cluster.rendering.ray_up_commands import file_mounts, setup_commands, start_head, start_worker
from cluster.rendering.ray_up_nodes import HEAD, node_types, num_workers, offers_by_host, provider_of
from cluster.rendering.refusals import check_for_hosts, check_for_ssh
from cluster.rendering.yaml_text import as_yaml
from protocol.errors import StartupError

FILE = "ray-up.yaml"
COMMENT_WIDTH = 110

ON_LOCAL = """Under `local` Ray's newer autoscaler (v2, the default since 2.50) starts all workers but one:
so the head node is told to use v1 below (RAY_enable_autoscaler_v2=0). v1 also starts Ray anew on a host
whose Ray died, about 40 s later."""
AGAIN = "A start that failed is tried again here: the autoscaler itself would give the host up for good."
WHICH_HOST = f"""All hosts have one kind of node here, and so the same commands: each looks up by its own
address which workers it may run. {AGAIN}"""
NODE_TYPES = """A pool's workers are placed by a resource that only its own hosts offer. The head node
offers no CPUs: it runs Ray's control plane and the router."""
ACCESS = """`ray start --address` and `ray status` show the token only where RAY_AUTH_MODE=token is set, or
the head node refuses them: it is set in ~/.bashrc, which Ray reads before each command. `ray down` calls a
bare `ray stop`: `ray` must be on the PATH there."""
STARTS = """RAY_health_check_*: a host that is cut off is given up after about 8 s instead of a minute."""
IDLE = """So long after its last worker a host beyond the least number is ended."""


def ray_up_files(config: ClusterConfig) -> dict[str, str]:
    """The file by its name. Raises `StartupError` for what is missing in `deploy.ray_up`."""
    ray_up = config.deploy.ray_up
    if ray_up.provider == "local" and ray_up.ssh_private_key is None:
        raise StartupError("deploy.ray_up.ssh_private_key is empty: name the key that opens the hosts")
    check_for_hosts(config)
    check_for_ssh(config)
    here = clustered(config)
    blocks = [_comment(_head(here)), *_blocks(here)]
    return {FILE: "\n\n".join(block.rstrip("\n") for block in blocks) + "\n"}


def _head(config: ClusterConfig) -> list[str]:
    name, port = config.deploy.name, config.http.port
    return [
        f"The Ray cluster {name!r} for Splitserve, written by `splitserve render ray-up`.",
        "",
        "    ray get-auth-token --generate     # once: ~/.ray/auth_token opens the cluster",
        f"    ray up -y {FILE}             # minutes; `ray exec {FILE} 'ray status'` shows who has joined",
        f"    ray exec {FILE} 'splitserve deploy --config ~/splitserve.yaml'",
        f"    ray exec {FILE} 'splitserve status --port {port}'",
        "",
        "A changed configuration:",
        f"    ray rsync-up {FILE} {config.deploy.ray_up.config_file} '~/splitserve.yaml'",
        "    and `splitserve deploy` again, which replaces only what the change concerns.",
        "The end:",
        f"    ray exec {FILE} 'splitserve undeploy --config ~/splitserve.yaml'",
        f"    ray down -y {FILE}",
        *_how_to_stop_workers(config.deploy.ray_up),
    ]


def _how_to_stop_workers(ray_up: RayUp) -> list[str]:
    if ray_up.provider != "local":
        return []
    hosts = " ".join(dict.fromkeys([*ray_up.prefill.hosts, *ray_up.decode.hosts]))
    ssh = f"ssh -i {ray_up.ssh_private_key} {ray_up.ssh_user}@$host"
    return [
        f"    for host in {hosts}; do {ssh} \"bash -lic 'ray stop --force'\"; done",
        "The last line because `ray down` stops the head node alone: Ray on the other hosts ends by itself",
        "a minute later, but leaves a process behind on each.",
    ]


def _blocks(config: ClusterConfig) -> Iterator[str]:
    ray_up = config.deploy.ray_up
    local = ray_up.provider == "local"
    yield as_yaml({"cluster_name": config.deploy.name, "max_workers": num_workers(config)})
    if not local:
        yield _block(IDLE, {"idle_timeout_minutes": 10})
    yield _block(ON_LOCAL if local else "", {"provider": provider_of(config)})
    yield as_yaml({"auth": _auth(ray_up)})
    if not local:
        types = {"available_node_types": node_types(config), "head_node_type": HEAD}
        yield _block(NODE_TYPES, types)
    yield _block(ACCESS, {"file_mounts": file_mounts(ray_up), "setup_commands": setup_commands(ray_up)})
    if ray_up.package is not None:
        yield as_yaml({"rsync_exclude": ["**/.git", "**/.venv", "**/__pycache__"]})
    yield _block(STARTS, {"head_start_ray_commands": start_head(config)})
    offers = offers_by_host(config) if local else {}
    yield _block(
        WHICH_HOST if local else AGAIN, {"worker_start_ray_commands": start_worker(config, offers)}
    )


def _auth(ray_up: RayUp) -> dict[str, str]:
    key = ray_up.ssh_private_key
    return {"ssh_user": ray_up.ssh_user} | ({"ssh_private_key": str(key)} if key is not None else {})


def _block(why: str, content: Mapping[str, Any]) -> str:
    return (_comment(textwrap.wrap(" ".join(why.split()), COMMENT_WIDTH)) + "\n" if why else "") + as_yaml(
        content
    )


def _comment(lines: list[str]) -> str:
    return "\n".join(f"# {line}".rstrip() for line in lines)
