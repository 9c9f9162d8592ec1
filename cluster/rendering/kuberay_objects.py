"""What belongs beside the RayService: the model's volume, who may reach whom, disruptions, monitoring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cluster.config import ClusterConfig
from cluster.rendering.kuberay_groups import PodGroup, quantity
from cluster.rendering.kuberay_pods import (
    CONFIG_FILE,
    HEAD_PORTS,
    METRICS_PORT,
    config_map_name,
    labels,
    model_claim_name,
)
from cluster.rendering.serve_config import serve_arguments
from cluster.rendering.yaml_text import as_yaml

Yaml = dict[str, Any]

NAMESPACE_LABEL = "kubernetes.io/metadata.name"


def objects_beside(config: ClusterConfig, groups: list[PodGroup]) -> Iterator[Yaml]:
    """In the order in which they are best applied."""
    kuberay = config.deploy.kuberay
    if not kuberay.models.per_pod and kuberay.models.claim is None:
        yield _model_claim(config)
    yield _config_map(config)
    if kuberay.network_policy:
        yield _network_policy(config)
    yield from _disruption_budgets(config, groups)
    if kuberay.service_monitor:
        yield _metrics_service(config)
        yield _service_monitor(config)


def metadata(config: ClusterConfig, name: str) -> Yaml:
    """Of an object of this cluster."""
    namespace = config.deploy.kuberay.namespace
    return {"name": name} | ({"namespace": namespace} if namespace else {}) | {"labels": labels(config)}


def _model_claim(config: ClusterConfig) -> Yaml:
    models = config.deploy.kuberay.models
    spec: Yaml = {
        "accessModes": [models.access],
        "resources": {"requests": {"storage": quantity(models.size)}},
    }
    if models.storage_class:
        spec["storageClassName"] = models.storage_class
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata(config, model_claim_name(config)),
        "spec": spec,
    }


def _config_map(config: ClusterConfig) -> Yaml:
    """What Serve gets, for commands that run in the head's pod."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(config, config_map_name(config)),
        "data": {CONFIG_FILE: as_yaml(serve_arguments(config))},
    }


def _network_policy(config: ClusterConfig) -> Yaml:
    """Into our pods. Out of them everything may go: the hub, Redis and DNS lie elsewhere."""
    kuberay = config.deploy.kuberay
    serve, dashboard = config.http.port, HEAD_PORTS["dashboard"]
    clients: Yaml = {"ports": _ports(serve)}
    if kuberay.clients:
        clients = {"from": [{"namespaceSelector": {"matchLabels": dict(kuberay.clients)}}]} | clients
    rules: list[Yaml] = [
        {"from": [{"podSelector": {"matchLabels": labels(config)}}]},  # Ray, gRPC and NIXL: any port
        clients,
        {"from": [_namespace(kuberay.operator_namespace)], "ports": _ports(serve, dashboard)},
    ]
    if kuberay.service_monitor:
        rules.append(
            {"from": [_namespace(kuberay.monitoring_namespace)], "ports": _ports(serve, METRICS_PORT)}
        )
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(config, config.deploy.name),
        "spec": {
            "podSelector": {"matchLabels": labels(config)},
            "policyTypes": ["Ingress"],
            "ingress": rules,
        },
    }


def _namespace(name: str) -> Yaml:
    return {"namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: name}}}


def _ports(*numbers: int) -> list[Yaml]:
    return [{"port": number, "protocol": "TCP"} for number in numbers]


def _disruption_budgets(config: ClusterConfig, groups: list[PodGroup]) -> Iterator[Yaml]:
    """One pod of a group may be evicted at a time.

    A RayCluster has no scale subresource, so that only an absolute `minAvailable` counts; and a group of
    one gets no budget, since nobody could drain its node any more.
    """
    for group in groups:
        if group.num_pods > 1:
            yield {
                "apiVersion": "policy/v1",
                "kind": "PodDisruptionBudget",
                "metadata": metadata(config, f"{config.deploy.name}-{group.name}"),
                "spec": {
                    "minAvailable": group.num_pods - 1,
                    "selector": {"matchLabels": labels(config, group.name)},
                },
            }


def _metrics_service(config: ClusterConfig) -> Yaml:
    """The head's proxy alone: scraped at every pod's, the router's page would be counted many times."""
    ports = {"serve": config.http.port, "metrics": METRICS_PORT}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(config, f"{config.deploy.name}-metrics"),
        "spec": {
            "clusterIP": "None",
            "selector": labels(config, "head"),
            "ports": [{"name": name, "port": port, "targetPort": name} for name, port in ports.items()],
        },
    }


def _service_monitor(config: ClusterConfig) -> Yaml:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": metadata(config, config.deploy.name),
        "spec": {
            "selector": {"matchLabels": labels(config)},
            "endpoints": [
                {"port": name, "path": "/metrics", "interval": "15s"} for name in ("serve", "metrics")
            ],
        },
    }
