"""The file for `ray up`: Ray takes it, hosts offer what their pools ask for, mistakes are named."""

from __future__ import annotations

import json
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import load_config
from cluster.rendering import render_files
from protocol.errors import StartupError

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.parent for path in (ROOT / "deploy").glob("*/ray-up.yaml"))
LOCAL: dict[str, Any] = {
    "model": "/models/m",
    "decode": {"num_workers": 4},
    "deploy": {
        "name": "lab",
        "ray_up": {
            "ssh_private_key": "~/.ssh/key",
            "head": {"host": "10.0.0.1"},
            "prefill": {"hosts": ["10.0.0.2"]},
            "decode": {"hosts": ["10.0.0.2", "10.0.0.3"]},
            "environment": {"UCX_TLS": "rc,cuda copy"},
        },
    },
}
AWS: dict[str, Any] = {
    "provider": "aws",
    "region": "us-west-2",
    "zone": "us-west-2a",
    "head": {"instance_type": "m6i.xlarge"},
    "prefill": {"instance_type": "p4d.24xlarge", "num_hosts": 1},
    "decode": {"instance_type": "g6.12xlarge", "num_hosts": 2, "max_num_hosts": 3},
}
GCP = AWS | {"provider": "gcp", "project_id": "mine", "image": "projects/p/global/images/family/f"}


def rendered(tmp_path: Path, document: dict[str, Any], **ray_up: Any) -> dict[str, Any]:
    """What the file says; `ray_up` replaces keys of that section."""
    document = deepcopy(document)
    document["deploy"]["ray_up"] |= ray_up
    path = tmp_path / "splitserve.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    files = render_files("ray-up", load_config(path))
    assert list(files) == ["ray-up.yaml"]
    loaded: dict[str, Any] = yaml.safe_load(files["ray-up.yaml"])
    return loaded


@pytest.mark.parametrize(
    "ray_up", [{}, AWS, GCP, {"package": "dist/s.whl", "pins": "requirements/serve.txt"}]
)
def test_ray_accepts_it(tmp_path: Path, ray_up: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(rendered(tmp_path, LOCAL, **ray_up)))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_rendered_anew_and_ray_accepts_them(example: Path) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    text = render_files("ray-up", load_config(example / "splitserve.yaml"))["ray-up.yaml"]
    assert text == (example / "ray-up.yaml").read_text(encoding="utf-8"), "render it anew"
    validate_config(prepare_config(yaml.safe_load(text)))


def test_each_host_offers_room_for_its_share_of_the_workers(tmp_path: Path) -> None:
    command = rendered(tmp_path, LOCAL)["worker_start_ray_commands"][-1]
    assert offered(command, "10.0.0.2") == {"splitserve_prefill": 1, "splitserve_decode": 2}
    assert offered(command, "10.0.0.3") == {"splitserve_decode": 2}


def test_a_host_of_both_pools_offers_as_much_of_one_resource_as_both_take(tmp_path: Path) -> None:
    shared = {role: LOCAL.get(role, {}) | {"resources": {"big": 1}} for role in ("prefill", "decode")}
    command = rendered(tmp_path, LOCAL | shared)["worker_start_ray_commands"][-1]
    assert offered(command, "10.0.0.2") == {"big": 3}


def test_a_host_that_is_not_in_the_file_does_not_start(tmp_path: Path) -> None:
    command = rendered(tmp_path, LOCAL)["worker_start_ray_commands"][-1]
    done = run_on(command, "10.0.0.33")
    assert done.returncode == 1
    assert "not one of the hosts in this file" in done.stderr


def offered(command: str, address: str) -> dict[str, int]:
    """The resources with which `ray start` would be called there."""
    done = run_on(command, address)
    assert done.returncode == 0, done.stderr
    offers: dict[str, int] = json.loads(done.stdout.split("--resources=")[1])
    return offers


def test_a_start_that_failed_is_tried_again(tmp_path: Path) -> None:
    """The autoscaler never tries a host again whose start has failed once."""
    command = rendered(tmp_path, LOCAL)["worker_start_ray_commands"][-1]
    started = tmp_path / "started"
    ray = f'ray() {{ [ "$1" = stop ] || [ -e {started} ] || ! touch {started}; }}; sleep() {{ :; }}\n'
    assert run_on(ray + command, "10.0.0.2").returncode == 0
    assert run_on("ray() { false; }; sleep() { :; }\n" + command, "10.0.0.2").returncode == 1


def run_on(command: str, address: str) -> subprocess.CompletedProcess[str]:
    """As a host of that address would, with a `ray` and a `hostname` that only talk."""
    fakes = f'ray() {{ echo "$@"; }}; hostname() {{ [ "$1" = -I ] && echo "{address} "; }}\n'
    return subprocess.run(["bash", "-c", fakes + command], capture_output=True, text=True, check=False)


def test_a_rolling_update_that_starts_successors_first_has_room_for_them(tmp_path: Path) -> None:
    document = LOCAL | {"decode": {"num_workers": 4, "max_surge_percent": 50}}
    command = rendered(tmp_path, document)["worker_start_ray_commands"][-1]
    assert offered(command, "10.0.0.3") == {"splitserve_decode": 3}


def test_a_pool_that_grows_has_room_for_all_that_it_may_become(tmp_path: Path) -> None:
    document = LOCAL | {"decode": {"autoscaling": {"min_workers": 1, "max_workers": 6}}}
    command = rendered(tmp_path, document)["worker_start_ray_commands"][-1]
    assert offered(command, "10.0.0.3") == {"splitserve_decode": 3}


def test_values_of_the_environment_reach_ray_as_they_are(tmp_path: Path) -> None:
    document = rendered(tmp_path, LOCAL)
    for commands in (document["head_start_ray_commands"], document["worker_start_ray_commands"]):
        echo = commands[-1].replace("ray start", 'echo "<$UCX_TLS>"; ray start', 1)
        assert "<rc,cuda copy>" in run_on(echo, "10.0.0.2").stdout


def test_pools_have_kinds_of_nodes_of_their_own_in_a_cloud(tmp_path: Path) -> None:
    document = rendered(tmp_path, LOCAL, **AWS)
    types = document["available_node_types"]
    assert types["head"]["resources"] == {"CPU": 0}
    assert types["prefill"]["resources"] == {"splitserve_prefill": 1}
    assert types["decode"]["resources"] == {"splitserve_decode": 2}  # of 4 workers on up to 3 hosts
    assert (types["decode"]["min_workers"], types["decode"]["max_workers"]) == (2, 3)
    assert document["max_workers"] == 4


def test_what_the_user_says_of_an_instance_is_laid_over_what_is_rendered(tmp_path: Path) -> None:
    decode = AWS["decode"] | {"node_config": {"ImageId": "ami-1", "InstanceType": "g6.48xlarge"}}
    types = rendered(tmp_path, LOCAL, **AWS | {"decode": decode})["available_node_types"]
    node = types["decode"]["node_config"]
    assert (node["ImageId"], node["InstanceType"]) == ("ami-1", "g6.48xlarge")
    assert node["BlockDeviceMappings"]


@pytest.mark.parametrize(
    ("ray_up", "complaint"),
    [
        ({"ssh_private_key": None}, "ssh_private_key is empty"),
        ({"head": {}}, "head.host is empty"),
        ({"decode": {}}, "decode.hosts is empty"),
        ({"head": {"host": "10.0.0.3"}}, "the head node computes nothing"),
        (AWS | {"region": ""}, "region is empty"),
        (AWS | {"head": {}}, "head.instance_type is empty"),
        (GCP | {"project_id": None}, "project_id is empty"),
        (GCP | {"image": ""}, "image is empty"),
    ],
)
def test_a_missing_key_is_named(tmp_path: Path, ray_up: dict[str, Any], complaint: str) -> None:
    with pytest.raises(StartupError, match=complaint):
        rendered(tmp_path, LOCAL, **ray_up)


def test_a_host_offers_room_for_all_ranks_of_its_workers(tmp_path: Path) -> None:
    document = LOCAL | {"decode": {"num_workers": 4, "tensor_parallel_size": 3}}
    command = rendered(tmp_path, document)["worker_start_ray_commands"][-1]
    assert '"splitserve_decode": 6' in command
