"""From the configuration to a RayService for the KubeRay operator, and to what belongs beside it."""

from __future__ import annotations

import json
from importlib import metadata as packages
from pathlib import Path
from typing import Any

import yaml

from cluster.config import ClusterConfig
from cluster.rendering.clustered import clustered
from cluster.rendering.kuberay_groups import PodGroup, pod_groups
from cluster.rendering.kuberay_objects import metadata, objects_beside
from cluster.rendering.kuberay_pods import (
    API_KEY_FOLDER,
    FAREWELL_S,
    MODELS,
    container_security,
    head_template,
    worker_template,
)
from cluster.rendering.refusals import check_for_hosts, check_for_pods
from cluster.rendering.serve_config import serve_config
from protocol.errors import StartupError

Yaml = dict[str, Any]


def kuberay_documents(config: ClusterConfig) -> list[Yaml]:
    """The manifests, in the order in which they are applied. Raises `StartupError`."""
    check_for_hosts(config)
    here = in_pods(clustered(config))
    check_for_pods(here)
    groups = pod_groups(here)
    return [*objects_beside(here, groups), _ray_service(here, groups)]


def in_pods(config: ClusterConfig) -> ClusterConfig:
    """`config` with the paths that it has inside of a pod. Raises `StartupError`."""
    kuberay = config.deploy.kuberay
    if config.http.api_key_file is not None and kuberay.api_key_secret is None:
        raise StartupError(
            "http.api_key_file is a file of one machine, which no pod has: put it into a secret under the"
            " name `key`, and name the secret in deploy.kuberay.api_key_secret"
        )
    if kuberay.redis_password_secret and not kuberay.redis_address:
        raise StartupError("deploy.kuberay.redis_password_secret is set, but redis_address is not")
    key_file = Path(API_KEY_FOLDER, "key") if kuberay.api_key_secret else None
    return config.model_copy(
        update={
            "cache_dir": Path(MODELS, "splitserve"),
            "http": config.http.model_copy(update={"api_key_file": key_file}),
        }
    )


def _ray_service(config: ClusterConfig, groups: list[PodGroup]) -> Yaml:
    in_place = config.deploy.kuberay.upgrade == "in_place"
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": metadata(config, config.deploy.name),
        "spec": {
            # Once a new cluster has taken over, streams of the old one may end for so long.
            "rayClusterDeletionDelaySeconds": round(config.drain_limit_s) + FAREWELL_S,
            "upgradeStrategy": {"type": "None" if in_place else "NewCluster"},
            "serveConfigV2": yaml.safe_dump(serve_config(config), sort_keys=False, width=120),
            "rayClusterConfig": _ray_cluster(config, groups),
        },
    }


def _ray_cluster(config: ClusterConfig, groups: list[PodGroup]) -> Yaml:
    kuberay = config.deploy.kuberay
    grows = any(group.max_pods > group.num_pods for group in groups)
    cluster: Yaml = {
        "rayVersion": packages.version("ray"),
        "authOptions": {"mode": "token"}
        | ({"secretName": kuberay.ray_token_secret} if kuberay.ray_token_secret else {}),
    }
    if grows:
        cluster["enableInTreeAutoscaling"] = True
        cluster["autoscalerOptions"] = {
            "version": "v2",
            "idleTimeoutSeconds": kuberay.autoscaler_idle_s,
            "securityContext": container_security(),
        }
    if kuberay.redis_address:
        cluster["gcsFaultToleranceOptions"] = _redis(config)
    cluster["headGroupSpec"] = {
        "rayStartParams": {
            "num-cpus": "0",  # no worker shall run beside the control plane
            "num-gpus": "0",
            "dashboard-host": "0.0.0.0",  # noqa: S104  # the operator hands the Serve config to it
            **_object_store(config),
        },
        "template": head_template(config, with_autoscaler=grows),
    }
    cluster["workerGroupSpecs"] = [_worker_group(config, group) for group in groups]
    return cluster


def _worker_group(config: ClusterConfig, group: PodGroup) -> Yaml:
    resources = json.dumps(dict(group.ray_resources))
    return {
        "groupName": group.name,
        "replicas": group.num_pods,
        "minReplicas": group.num_pods,
        "maxReplicas": group.max_pods,
        # In single quotes, because the operator pastes it into a shell command.
        "rayStartParams": {"resources": f"'{resources}'", **_object_store(config)},
        "template": worker_template(config, group),
    }


def _object_store(config: ClusterConfig) -> Yaml:
    """Ray would take 30 % of the memory for it, and more than /dev/shm has; no request uses it."""
    return {"object-store-memory": str(config.ray.object_store_bytes)}


def _redis(config: ClusterConfig) -> Yaml:
    kuberay = config.deploy.kuberay
    options: Yaml = {"redisAddress": kuberay.redis_address}
    if kuberay.redis_password_secret:
        reference = {"name": kuberay.redis_password_secret, "key": "password"}
        options["redisPassword"] = {"valueFrom": {"secretKeyRef": reference}}
    return options
