"""The manifests of all examples are ones that Kubernetes, the KubeRay operator and Serve take."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kuberay_checks import all_problems, load_all, problems

from cluster.config import ClusterConfig, load_config
from cluster.rendering import render_files
from protocol.ids import Role

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = sorted(path.parent for path in (ROOT / "deploy").glob("*/kuberay.yaml"))

Yaml = dict[str, Any]


def documents(config: ClusterConfig) -> list[Yaml]:
    return load_all(render_files("kuberay", config)["kuberay.yaml"])


def rendered(**changes: object) -> list[Yaml]:
    return documents(load_config(None, {key.replace("__", "."): value for key, value in changes.items()}))


def of_kind(found: list[Yaml], kind: str) -> list[Yaml]:
    return [document for document in found if document["kind"] == kind]


def service(**changes: object) -> Yaml:
    (found,) = of_kind(rendered(**changes), "RayService")
    return found


def groups(ray_service: Yaml) -> dict[str, Yaml]:
    return {
        group["groupName"]: group for group in ray_service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    }


def container(group: Yaml) -> Yaml:
    found: Yaml = group["template"]["spec"]["containers"][0]
    return found


def serve_arguments(ray_service: Yaml) -> Yaml:
    arguments: Yaml = yaml.safe_load(ray_service["spec"]["serveConfigV2"])["applications"][0]["args"]
    return arguments


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_a_cluster_would_take_the_example(example: Path) -> None:
    assert all_problems((example / "kuberay.yaml").read_text(encoding="utf-8")) == []


def test_there_is_an_example_for_every_place() -> None:
    names = {"laptop", "one-gpu", "one-node", "two-nodes-rdma", "mixed-gpus", "multi-tenant"}
    assert {example.name for example in EXAMPLES} == names


def test_the_examples_are_rendered_from_what_their_configurations_say_now() -> None:
    check = [sys.executable, ROOT / "scripts" / "render_examples", "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_workers_of_an_example_find_places(example: Path) -> None:
    """Every pool's workers get the custom resources, CPUs and GPUs that they ask Ray for."""
    config = load_config(example / "splitserve.yaml")
    (ray_service,) = of_kind(documents(config), "RayService")
    offered: dict[str, float] = {}
    for group in groups(ray_service).values():
        limits = container(group)["resources"]["limits"]
        pod = yaml.safe_load(group["rayStartParams"]["resources"].strip("'"))
        pod |= {"CPU": float(limits["cpu"]), "GPU": float(limits.get("nvidia.com/gpu", 0))}
        for name, amount in pod.items():
            offered[name] = offered.get(name, 0) + amount * group["maxReplicas"]
    asked: dict[str, float] = {}
    for pool in (load_config(None, serve_arguments(ray_service)).pool(role) for role in Role):
        for name, amount in {**pool.resources, "CPU": pool.num_cpus, "GPU": pool.num_gpus}.items():
            asked[name] = asked.get(name, 0) + amount * (pool.autoscaling.max_workers or pool.num_workers)
    assert {name for name, amount in asked.items() if amount > offered.get(name, 0)} == set()


Plant = Callable[[Yaml], object]


def cluster_of(document: Yaml) -> Yaml:
    found: Yaml = document["spec"]["rayClusterConfig"]
    return found


def plant_in_serve_config(change: Callable[[Yaml], object]) -> Plant:
    def plant(document: Yaml) -> None:
        config = yaml.safe_load(document["spec"]["serveConfigV2"])
        change(config)
        document["spec"]["serveConfigV2"] = yaml.safe_dump(config)

    return plant


GROUP = "spec.rayClusterConfig.workerGroupSpecs"


@pytest.mark.parametrize(
    ("plant", "path"),
    [
        (lambda d: cluster_of(d).update(workerGroupSpec=[]), "spec.rayClusterConfig.workerGroupSpec"),
        (lambda d: cluster_of(d).update(rayVersion=2.60), "spec.rayClusterConfig.rayVersion"),
        (
            lambda d: cluster_of(d)["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
            "spec.rayClusterConfig.headGroupSpec.rayStartParams.num-cpus",
        ),
        (
            lambda d: container(cluster_of(d)["workerGroupSpecs"][1]).update(volumeMount=[]),
            f"{GROUP}.1.template.spec.containers.0.volumeMount",
        ),
        (
            lambda d: container(cluster_of(d)["workerGroupSpecs"][0])["resources"]["limits"].update(
                memory="16GiB"
            ),
            f"{GROUP}.0.template.spec.containers.0.resources.limits.memory",
        ),
        (
            lambda d: container(cluster_of(d)["workerGroupSpecs"][0])["resources"]["limits"].update(
                {"nvidia.com/gpu": "2"}
            ),
            f"{GROUP}.0.template.spec.containers.0.resources.requests.nvidia.com/gpu",
        ),
        (lambda d: cluster_of(d)["workerGroupSpecs"][1].update(minReplicas=3), f"{GROUP}.1.minReplicas"),
        (
            lambda d: cluster_of(d)["workerGroupSpecs"][0]["template"]["spec"]["volumes"].pop(0),
            f"{GROUP}.0.template.spec.containers.0.volumeMounts",
        ),
        (
            plant_in_serve_config(lambda c: c["applications"][0].update(import_paht="x")),
            "spec.serveConfigV2.applications.0.import_paht",
        ),
        (
            plant_in_serve_config(lambda c: c["applications"][0]["args"]["decode"].update(num_wrokers=2)),
            "spec.serveConfigV2.applications.0.args.decode.num_wrokers",
        ),
    ],
)
def test_a_planted_mistake_is_refused_with_its_path(plant: Plant, path: str) -> None:
    document = service(prefill__num_gpus=1, decode__num_gpus=1)
    assert problems(document) == []
    broken = copy.deepcopy(document)
    plant(broken)
    found = [problem.partition(": ")[0] for problem in problems(broken)]
    assert path in found


def test_a_misspelt_key_of_another_object_is_refused_with_its_path() -> None:
    (policy,) = of_kind(rendered(), "NetworkPolicy")
    assert problems(policy) == []
    policy["spec"]["podSelectors"] = policy["spec"].pop("podSelector")
    assert problems(policy)[0].startswith("spec: ")
    assert "podSelectors" in problems(policy)[0]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, for `kubectl kustomize`")
def test_the_overlay_renders_manifests_that_a_cluster_would_take() -> None:
    command = ["kubectl", "kustomize", ROOT / "deploy" / "overlay"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all_problems(done.stdout) == []
    assert "image: splitserve" not in done.stdout
    found = load_all(done.stdout)
    assert {document["metadata"]["namespace"] for document in found} == {"llm-staging"}
