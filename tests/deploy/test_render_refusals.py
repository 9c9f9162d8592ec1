"""What no cluster could run, or no `kubectl apply` would take, is refused when it is rendered, in words."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from cluster.config import load_config
from cluster.rendering import render_files
from protocol.errors import StartupError

K = "deploy.kuberay"
R = "deploy.ray_up"
HOSTS: dict[str, object] = {
    f"{R}.ssh_private_key": "~/.ssh/key",
    f"{R}.head.host": "10.0.0.1",
    f"{R}.prefill.hosts": ["10.0.0.2"],
    f"{R}.decode.hosts": ["10.0.0.3"],
}


def render(target: str, changes: dict[str, object]) -> str:
    files = render_files(target, load_config(None, (HOSTS if target == "ray-up" else {}) | changes))
    return "---\n".join(files.values())


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("http.port", 8080, "http.port is 8080"),
        ("http.port", 6379, "gcs-server"),
        ("http.port", 9101, "HAProxy's metrics"),
        ("http.port", 12000, "worker processes"),
        ("http.port", 80, "pods do not run as root"),
        ("decode.host", "10.0.0.5", "every pod has an address of its own"),
        ("router.resources", {"router_host": 1}, "no host will offer"),
        ("model", "./model", "another folder"),
        ("model", "~/model", "another folder"),
        ("model", "some/model.gguf", "another folder"),
        (f"{K}.prefill.shm", "64MiB", "Ray's object store"),
        (f"{K}.environment", {"A B": "x"}, "must be variables"),
        (f"{K}.namespace", "a.b", "namespace"),
        (f"{K}.gpu_resource", "gpu", "device plugin"),
        (f"{K}.rdma.resource", "", "device plugin"),
        (f"{K}.tolerations", [""], "keys of taints"),
        (f"{K}.clients", {"Not a label!": "x"}, "must be labels"),
        (f"{K}.prefill.node_selector", {"disk": "two words"}, "values"),
        (f"{K}.models", {"per_pod": True, "claim": "mine"}, "set one of them"),
        (f"{K}.models.size", 0, "greater than 0"),
        ("deploy.image", "two words", "must be an image"),
        ("prefill.num_gpus", float("inf"), "finite"),
        ("drain_limit_s", float("inf"), "finite"),
    ],
)
def test_kuberay(key: str, value: object, says: str) -> None:
    with pytest.raises(StartupError, match=says):
        render("kuberay", {key: value})


@pytest.mark.parametrize("name", ["SPLITSERVE_CLUSTER_TOKEN", "RAY_AUTH_TOKEN", "HF_TOKEN"])
@pytest.mark.parametrize("target", ["kuberay", "ray-up"])
def test_a_secret_among_the_variables_is_refused_and_not_repeated(name: str, target: str) -> None:
    section = {"kuberay": K, "ray-up": R}[target]
    with pytest.raises(StartupError, match=f"{section}.environment holds {name}, .* to all: ") as refusal:
        render(target, {f"{section}.environment": {name: "s3cret"}})
    assert "s3cret" not in refusal.value.message


def test_a_bad_name_is_told_without_what_stands_beside_it() -> None:
    with pytest.raises(StartupError, match=r"not 'A B' \(on the command line\)") as refusal:
        render("kuberay", {f"{K}.environment": {"A B": "x", "KEY": "s3cret"}})
    assert "s3cret" not in refusal.value.message


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        (f"{R}.decode.hosts", ["10.0.0.3", "10.0.0.3"], "twice"),
        (f"{R}.decode.hosts", [""], "addresses of hosts"),
        (f"{R}.decode.hosts", ["a'b"], "addresses of hosts"),
        (f"{R}.head.host", "two words", "a name or an address"),
        (f"{R}.environment", {"A B": "x"}, "must be variables"),
        ("router.resources", {"router_host": 1}, "no host will offer"),
        ("model", "../model", "another folder"),
    ],
)
def test_ray_up(key: str, value: object, says: str) -> None:
    with pytest.raises(StartupError, match=says):
        render("ray-up", {key: value})


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.2", "::1"])
def test_every_name_of_the_loopback_gives_way_to_addresses_that_others_reach(host: str) -> None:
    served: dict[str, Any] = yaml.safe_load(render("serve", {"http.host": host, "decode.host": host}))
    assert served["http_options"]["host"] == "0.0.0.0"  # noqa: S104
    assert served["applications"][0]["args"]["decode"]["host"] == "auto"


def test_the_router_may_be_placed_where_a_pool_is_or_on_a_node_of_rays_naming() -> None:
    for name in ("splitserve_decode", "node:__internal_head__"):
        assert name in render("kuberay", {"router.resources": {name: 0.1}})
