"""What does a pod of the cluster look like? Head and workers differ in size, devices and privileges."""

from __future__ import annotations

import math
from typing import Any

from cluster.config import ClusterConfig
from cluster.environment import FINDS_LOST_HOSTS
from cluster.rendering.kuberay_groups import PodGroup, quantity

Yaml = dict[str, Any]

MODELS = "/models"
"""Where all pods mount the volume with the model."""
CONFIG_FOLDER, CONFIG_FILE = "/etc/splitserve/config", "splitserve.yaml"
"""Where the head finds the configuration, for `splitserve doctor`, `status` and `drain` there."""
API_KEY_FOLDER = "/etc/splitserve/api-key"
USER = 1000
"""User and group of the image, `ray`."""
START_S = 300
"""How long the successors of a pod's workers may take to start, before those drain."""
FAREWELL_S = 30
"""Beyond that: what a pod may take for its end."""

HEAD_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}
METRICS_PORT = 8080
"""Of Ray's own metrics, on every node."""

_FAREWELL = """\
timeout 10 ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message 'the pod ends' \\
  --deadline-remaining-seconds {limit_s} || exit 0
for _ in $(seq {limit_s}); do pgrep -f ^ray::ServeReplica > /dev/null || exit 0; sleep 1; done
"""
"""Before a worker's pod ends: Serve starts its replicas elsewhere, lets those here drain, and stops them.

By itself the pod's end would kill them; Ray places nothing on the node from here on.
"""
_POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",  # a large volume is not walked at each start
    "seccompProfile": {"type": "RuntimeDefault"},
}
_LOCKS_MEMORY = {
    # Kubernetes gives capabilities to no process of another user: for them this one has no effect.
    "runAsNonRoot": False,
    "runAsUser": 0,
    "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
}


def labels(config: ClusterConfig, component: str | None = None) -> dict[str, str]:
    """By which policies and services find our pods, whichever RayCluster they are of.

    Not `app.kubernetes.io/name`: the operator's service of the head looks for pods that have its own there.
    """
    found = {"app.kubernetes.io/part-of": "splitserve", "app.kubernetes.io/instance": config.deploy.name}
    return found | ({"app.kubernetes.io/component": component} if component else {})


def head_template(config: ClusterConfig, *, with_autoscaler: bool) -> Yaml:
    """The head's pod. Only beside the autoscaler it talks to Kubernetes."""
    head = config.deploy.kuberay.head
    container = _container(config, "ray-head", HEAD_PORTS, FINDS_LOST_HOSTS)
    container["resources"] = _resources({"cpu": str(head.cpus), "memory": quantity(head.memory)})
    container["volumeMounts"].append({"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True})
    spec = _pod_spec(config, container)
    spec["volumes"].append({"name": "config", "configMap": {"name": config_map_name(config)}})
    if with_autoscaler:
        del spec["automountServiceAccountToken"]
    if head.node_selector:
        spec["nodeSelector"] = dict(head.node_selector)
    return {"metadata": {"labels": labels(config, "head")}, "spec": spec}


def worker_template(config: ClusterConfig, group: PodGroup) -> Yaml:
    """A pod of a group."""
    kuberay = config.deploy.kuberay
    as_root = kuberay.rdma.resource is not None and kuberay.rdma.as_root
    container = _container(config, "ray-worker", {}, {})
    container["resources"] = _resources(_worker_limits(config, group))
    if as_root:
        container["securityContext"] |= _LOCKS_MEMORY
    container["lifecycle"] = {"preStop": {"exec": {"command": ["bash", "-c", _farewell(config)]}}}
    container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108
    spec = _pod_spec(config, container)
    shm = {"medium": "Memory", "sizeLimit": quantity(group.shm_bytes)}
    spec["volumes"].append({"name": "shm", "emptyDir": shm})
    if group.node_selector:
        spec["nodeSelector"] = dict(group.node_selector)
    taints = [kuberay.gpu_resource] * (group.gpus > 0) + kuberay.tolerations
    if taints:
        spec["tolerations"] = [{"key": key, "operator": "Exists"} for key in taints]
    return {"metadata": {"labels": labels(config, group.name)}, "spec": spec}


def _farewell(config: ClusterConfig) -> str:
    return _FAREWELL.format(limit_s=drain_s(config))


def drain_s(config: ClusterConfig) -> int:
    """How long the pods' workers may take to go: to be started elsewhere, and to end what runs."""
    return round(config.drain_limit_s) + START_S


def _worker_limits(config: ClusterConfig, group: PodGroup) -> dict[str, str]:
    kuberay = config.deploy.kuberay
    limits = {"cpu": str(group.cpus), "memory": quantity(group.memory_bytes)}
    if group.gpus:
        limits[kuberay.gpu_resource] = str(math.ceil(group.gpus))
    if kuberay.rdma.resource is not None:
        limits[kuberay.rdma.resource] = str(kuberay.rdma.count)
    return limits


def _resources(limits: dict[str, str]) -> Yaml:
    """Requests are the limits: the scheduler then neither overcommits nor throttles."""
    return {"limits": limits, "requests": dict(limits)}


def _pod_spec(config: ClusterConfig, container: Yaml) -> Yaml:
    kuberay = config.deploy.kuberay
    spec: Yaml = {
        "terminationGracePeriodSeconds": drain_s(config) + FAREWELL_S,
        "automountServiceAccountToken": False,
        "securityContext": dict(_POD_SECURITY),
        "initContainers": [_download(config, container["resources"]["limits"])],
        "containers": [container],
        "volumes": _volumes(config),
    }
    if kuberay.image_pull_secret:
        spec["imagePullSecrets"] = [{"name": kuberay.image_pull_secret}]
    return spec


def _container(config: ClusterConfig, name: str, ports: dict[str, int], variables: dict[str, str]) -> Yaml:
    """Ray's container. Its command and its probes are the operator's."""
    everywhere = {"serve": config.http.port, "metrics": METRICS_PORT}
    return {
        "name": name,
        "image": config.deploy.image,
        "ports": [{"name": key, "containerPort": port} for key, port in (ports | everywhere).items()],
        "env": _environment(config, variables),
        "securityContext": container_security(),
        "volumeMounts": _mounts(config),
    }


def container_security() -> Yaml:
    """What every container may; namespaces that enforce `restricted` ask for it."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _environment(config: ClusterConfig, variables: dict[str, str]) -> list[Yaml]:
    kuberay = config.deploy.kuberay
    plain = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        **_hub_variables(),
        "HF_HUB_OFFLINE": "1",  # the init container downloaded: all replicas load the same files
        **variables,
        **kuberay.environment,
    }
    token = _from_secret("SPLITSERVE_CLUSTER_TOKEN", kuberay.cluster_token_secret, "token")
    return [token, *_variables(plain)]


def _hub_variables() -> dict[str, str]:
    return {"HF_HOME": f"{MODELS}/hub"}


def _variables(plain: dict[str, str]) -> list[Yaml]:
    return [{"name": name, "value": value} for name, value in plain.items()]


def _from_secret(variable: str, secret: str, key: str) -> Yaml:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _download(config: ClusterConfig, limits: dict[str, str]) -> Yaml:
    """The init container that brings the model; no probe of the pod counts until it is done."""
    kuberay = config.deploy.kuberay
    token_secret = kuberay.hub_token_secret
    token = [_from_secret("HF_TOKEN", token_secret, "token")] if token_secret else []
    size = {name: limits[name] for name in ("cpu", "memory")}  # the pod has them already
    return {
        "name": "model",
        "image": config.deploy.image,
        "command": ["splitserve", "download", config.model, "--set", f"cache_dir={config.cache_dir}"],
        "env": [*token, *_variables(_hub_variables() | kuberay.environment)],
        "resources": _resources(size),
        "securityContext": container_security(),
        "volumeMounts": [{"name": "models", "mountPath": MODELS}],
    }


def _mounts(config: ClusterConfig) -> list[Yaml]:
    mounts: list[Yaml] = [{"name": "models", "mountPath": MODELS}]
    if config.deploy.kuberay.api_key_secret:
        mounts.append({"name": "api-key", "mountPath": API_KEY_FOLDER, "readOnly": True})
    return mounts


def _volumes(config: ClusterConfig) -> list[Yaml]:
    kuberay = config.deploy.kuberay
    volumes: list[Yaml] = [{"name": "models"} | _model_source(config)]
    if kuberay.api_key_secret:
        secret = {"secretName": kuberay.api_key_secret, "defaultMode": 0o440}
        volumes.append({"name": "api-key", "secret": secret})
    return volumes


def _model_source(config: ClusterConfig) -> Yaml:
    models = config.deploy.kuberay.models
    if models.per_pod:
        return {"emptyDir": {"sizeLimit": quantity(models.size)}}
    return {"persistentVolumeClaim": {"claimName": models.claim or model_claim_name(config)}}


def model_claim_name(config: ClusterConfig) -> str:
    """Of the claim that is rendered."""
    return f"{config.deploy.name}-models"


def config_map_name(config: ClusterConfig) -> str:
    """Of the ConfigMap with the configuration."""
    return f"{config.deploy.name}-config"
