"""What the configuration says is what the pods become; what cannot work is refused before that."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kuberay_checks import load_all, problems

from cluster.config import load_config
from cluster.rendering import render_files
from cluster.rendering.kuberay_pods import CONFIG_FILE, CONFIG_FOLDER
from protocol.errors import StartupError

Yaml = dict[str, Any]
K = "deploy.kuberay"


def rendered(changes: dict[str, object] | None = None) -> list[Yaml]:
    text = render_files("kuberay", load_config(None, changes or {}))["kuberay.yaml"]
    found = load_all(text)
    assert [problem for document in found for problem in problems(document)] == []
    return found


def the(kind: str, found: list[Yaml]) -> Yaml:
    (document,) = (document for document in found if document["kind"] == kind)
    return document


def cluster(changes: dict[str, object] | None = None) -> Yaml:
    found: Yaml = the("RayService", rendered(changes))["spec"]["rayClusterConfig"]
    return found


def pods(changes: dict[str, object] | None = None) -> dict[str, Yaml]:
    """Pod specs by group, the head's as `head`."""
    spec = cluster(changes)
    workers = {group["groupName"]: group["template"]["spec"] for group in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"]["template"]["spec"], **workers}


def variables(container: Yaml) -> dict[str, Any]:
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container["env"]}


def test_prefill_and_decode_have_groups_of_their_own_with_the_resource_that_places_them() -> None:
    groups = cluster({"decode.num_workers": 6, f"{K}.decode.workers_per_pod": 4})["workerGroupSpecs"]
    assert [(group["groupName"], group["replicas"]) for group in groups] == [("prefill", 1), ("decode", 2)]
    resources = [json.loads(group["rayStartParams"]["resources"].strip("'")) for group in groups]
    assert resources == [{"splitserve_prefill": 1}, {"splitserve_decode": 4}]


def test_a_pod_offers_what_all_ranks_of_its_workers_take() -> None:
    changes = {"decode.tensor_parallel_size": 2, "decode.num_gpus": 1, f"{K}.decode.workers_per_pod": 2}
    _, decode = cluster(changes)["workerGroupSpecs"]
    assert json.loads(decode["rayStartParams"]["resources"].strip("'")) == {"splitserve_decode": 4}
    (container,) = decode["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"


def test_a_pod_that_cannot_hold_all_ranks_of_its_workers_is_refused() -> None:
    with pytest.raises(StartupError, match=r"cpus is 4, but its 8 ranks \(of 1 workers\) reserve 1 each"):
        cluster({"decode.tensor_parallel_size": 4, "decode.pipeline_parallel_size": 2})


def test_a_pool_that_may_grow_brings_the_autoscaler_and_one_that_may_not_does_not() -> None:
    fixed = cluster()
    assert "enableInTreeAutoscaling" not in fixed
    grows = cluster({"decode.autoscaling.min_workers": 2, "decode.autoscaling.max_workers": 5})
    assert grows["enableInTreeAutoscaling"] is True
    assert grows["autoscalerOptions"]["version"] == "v2"
    assert grows["autoscalerOptions"]["securityContext"]["allowPrivilegeEscalation"] is False
    decode = grows["workerGroupSpecs"][1]
    assert (decode["minReplicas"], decode["replicas"], decode["maxReplicas"]) == (2, 2, 5)
    assert "automountServiceAccountToken" not in grows["headGroupSpec"]["template"]["spec"]


def test_workers_of_both_pools_can_share_pods() -> None:
    spec = cluster({f"{K}.share_pods": True, "prefill.num_gpus": 0.5, "decode.num_gpus": 0.5})
    (group,) = spec["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "1"
    assert json.loads(group["rayStartParams"]["resources"].strip("'")) == {
        "splitserve_prefill": 1,
        "splitserve_decode": 1,
    }


def test_pods_of_both_pools_offer_as_much_of_one_resource_as_both_take() -> None:
    taken = {"prefill.resources": {"big": 1}, "decode.resources": {"big": 2}}
    (group,) = cluster({f"{K}.share_pods": True} | taken)["workerGroupSpecs"]
    assert json.loads(group["rayStartParams"]["resources"].strip("'")) == {"big": 3}


def test_gpus_bring_their_toleration_and_only_to_workers() -> None:
    found = pods({"prefill.num_gpus": 1, f"{K}.tolerations": ["reserved"]})
    assert found["prefill"]["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists"},
        {"key": "reserved", "operator": "Exists"},
    ]
    assert found["decode"]["tolerations"] == [{"key": "reserved", "operator": "Exists"}]
    assert "tolerations" not in found["head"]


def test_no_pod_runs_as_root_or_talks_to_kubernetes() -> None:
    for spec in pods().values():
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is False
        for container in [*spec["containers"], *spec["initContainers"]]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


def test_the_operators_service_of_the_head_finds_our_head() -> None:
    """It looks for `app.kubernetes.io/name: kuberay`, which pods get unless they say something else."""
    spec = cluster()
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert "app.kubernetes.io/name" not in group["template"]["metadata"]["labels"]


def test_the_download_goes_through_the_same_proxy_as_all_else() -> None:
    for spec in pods({f"{K}.environment": {"HTTPS_PROXY": "http://proxy:3128"}}).values():
        assert variables(spec["initContainers"][0])["HTTPS_PROXY"] == "http://proxy:3128"


def test_the_clients_key_is_not_readable_for_all() -> None:
    for spec in pods({f"{K}.api_key_secret": "key"}).values():
        (secret,) = (volume["secret"] for volume in spec["volumes"] if "secret" in volume)
        assert secret == {"secretName": "key", "defaultMode": 0o440}


def test_rdma_lets_only_workers_lock_memory_and_not_what_downloads() -> None:
    found = pods({f"{K}.rdma.resource": "rdma/hca"})
    for name in ("prefill", "decode"):
        (worker,) = found[name]["containers"]
        assert worker["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert worker["securityContext"]["runAsUser"] == 0  # no other user would get the capability
        assert worker["resources"]["limits"]["rdma/hca"] == "1"
        assert "runAsUser" not in found[name]["initContainers"][0]["securityContext"]
    assert "runAsUser" not in found["head"]["containers"][0]["securityContext"]


def test_where_everybody_may_lock_memory_nobody_is_root() -> None:
    found = pods({f"{K}.rdma.resource": "rdma/hca", f"{K}.rdma.as_root": False})
    assert "runAsUser" not in found["decode"]["containers"][0]["securityContext"]
    assert found["decode"]["containers"][0]["resources"]["limits"]["rdma/hca"] == "1"


def test_all_pods_get_the_token_and_the_proxy_and_only_the_download_the_hubs_token() -> None:
    for spec in pods({f"{K}.hub_token_secret": "hub", f"{K}.environment": {"UCX_TLS": "rc"}}).values():
        (main,), (download,) = spec["containers"], spec["initContainers"]
        found = variables(main)
        secret = {"name": "splitserve-cluster-token", "key": "token"}
        assert found["SPLITSERVE_CLUSTER_TOKEN"] == {"secretKeyRef": secret}
        assert found["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
        assert found["UCX_TLS"] == "rc"
        assert found["HF_HUB_OFFLINE"] == "1"
        assert "HF_TOKEN" not in found
        assert variables(download)["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
        assert variables(download)["HF_HOME"] == found["HF_HOME"]


def test_the_proxy_is_on_every_node_and_routers_stand_behind_it() -> None:
    config = yaml.safe_load(the("RayService", rendered())["spec"]["serveConfigV2"])
    assert config["proxy_location"] == "EveryNode"
    assert config["applications"][0]["args"]["http"]["through"] == "proxy"
    for spec in pods({"http.port": 9000}).values():
        ports = {port["name"]: port["containerPort"] for port in spec["containers"][0]["ports"]}
        assert ports["serve"] == 9000


def test_a_pod_has_more_time_than_its_workers_take_to_drain() -> None:
    limit_s = 300
    service = the("RayService", rendered({"drain_limit_s": limit_s}))
    assert service["spec"]["rayClusterDeletionDelaySeconds"] > limit_s
    for spec in pods({"drain_limit_s": limit_s}).values():
        assert spec["terminationGracePeriodSeconds"] > limit_s


def test_a_workers_pod_tells_ray_before_it_ends() -> None:
    """By bash's own judgement a script, and one that waits no longer than the pod may live."""
    for name, spec in pods({"drain_limit_s": 100}).items():
        (container,) = spec["containers"]
        if name == "head":
            assert "lifecycle" not in container
            continue
        bash, _, script = container["lifecycle"]["preStop"]["exec"]["command"]
        assert subprocess.run([bash, "-n", "-c", script], check=False).returncode == 0
        (limit_s,) = re.findall(r"--deadline-remaining-seconds (\d+)", script)
        assert 100 < int(limit_s) < spec["terminationGracePeriodSeconds"]


def test_the_pods_last_command_ends_at_once_when_ray_is_gone(tmp_path: Path) -> None:
    (tmp_path / "ray").write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    (tmp_path / "ray").chmod(0o755)
    command = pods()["decode"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    done = subprocess.run(command, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout=60, check=False)
    assert done.returncode == 0


def test_shared_memory_has_a_size_and_rays_object_store_leaves_it_to_others() -> None:
    spec = cluster({f"{K}.decode.shm": "4GiB"})
    decode = spec["workerGroupSpecs"][1]
    (shm,) = (volume for volume in decode["template"]["spec"]["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "4Gi"}
    assert decode["rayStartParams"]["object-store-memory"] == "100000000"


def test_the_model_lies_on_a_claim_or_on_a_disk_of_each_pod() -> None:
    claim = the("PersistentVolumeClaim", rendered())
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    mine = rendered({f"{K}.models.claim": "mine"})
    assert [document["kind"] for document in mine if document["kind"] == "PersistentVolumeClaim"] == []
    own = pods({f"{K}.models.per_pod": True, f"{K}.models.size": "2GiB"})
    (models,) = (volume for volume in own["decode"]["volumes"] if volume["name"] == "models")
    assert models["emptyDir"] == {"sizeLimit": "2Gi"}


def test_redis_and_its_password_make_the_head_replaceable() -> None:
    assert "gcsFaultToleranceOptions" not in cluster()
    found = cluster({f"{K}.redis_address": "redis:6379", f"{K}.redis_password_secret": "redis"})
    assert found["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis:6379",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}},
    }


def test_an_api_key_comes_from_a_secret() -> None:
    found = rendered({f"{K}.api_key_secret": "keys", "http.api_key_file": "~/key"})
    arguments = yaml.safe_load(the("RayService", found)["spec"]["serveConfigV2"])["applications"][0]["args"]
    path = arguments["http"]["api_key_file"]
    for spec in pods({f"{K}.api_key_secret": "keys"}).values():
        folders = [mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]]
        assert path.rpartition("/")[0] in folders


def test_commands_in_the_heads_pod_find_the_configuration(tmp_path: Path) -> None:
    found = rendered({"decode.num_workers": 3})
    (mount,) = (m for m in pods()["head"]["containers"][0]["volumeMounts"] if m["name"] == "config")
    file = tmp_path / CONFIG_FILE
    file.write_text(the("ConfigMap", found)["data"][CONFIG_FILE], encoding="utf-8")
    assert mount["mountPath"] == CONFIG_FOLDER
    config = load_config(file)
    assert config.decode.num_workers == 3
    assert config.ray.address == "auto"


def test_a_disruption_budget_lets_one_pod_of_several_go() -> None:
    budget = the("PodDisruptionBudget", rendered({"decode.num_workers": 3}))
    assert budget["spec"]["minAvailable"] == 2
    labels = budget["spec"]["selector"]["matchLabels"]
    group = cluster({"decode.num_workers": 3})["workerGroupSpecs"][1]
    assert labels.items() <= group["template"]["metadata"]["labels"].items()


def test_strangers_reach_only_the_api() -> None:
    rules = the("NetworkPolicy", rendered({f"{K}.clients": {"team": "a"}}))["spec"]["ingress"]
    inside, clients, operator = rules
    assert "ports" not in inside
    assert clients["from"] == [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]
    assert [port["port"] for port in clients["ports"]] == [8000]
    assert {port["port"] for port in operator["ports"]} == {8000, 8265}


def test_metrics_are_scraped_at_the_heads_proxy_alone() -> None:
    found = rendered({f"{K}.service_monitor": True})
    (service,), monitor = [d for d in found if d["kind"] == "Service"], the("ServiceMonitor", found)
    head = the("RayService", found)["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]
    assert service["spec"]["selector"].items() <= head["metadata"]["labels"].items()
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    ports = {port["name"] for port in service["spec"]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({f"{K}.decode.workers_per_pod": 8}, "deploy.kuberay.decode.cpus is 4"),
        ({f"{K}.decode.memory": "2GiB"}, "deploy.kuberay.decode.memory"),
        ({"http.api_key_file": "key"}, "deploy.kuberay.api_key_secret"),
        ({f"{K}.redis_password_secret": "redis"}, "redis_address"),
        ({f"{K}.share_pods": True, "decode.num_workers": 2}, "workers_per_pod"),
        (
            {f"{K}.share_pods": True}
            | {f"{K}.prefill.node_selector": {"gpu": "a"}, f"{K}.decode.node_selector": {"gpu": "b"}},
            "node_selector.gpu is 'a' for prefill",
        ),
        ({"deploy.name": "Big_Name"}, "deploy.name"),
        ({f"{K}.prefil.cpus": 2}, "deploy.kuberay.prefil"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, object], told: str) -> None:
    with pytest.raises(StartupError) as caught:
        rendered(changes)
    assert told in caught.value.message
