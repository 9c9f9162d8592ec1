"""Would a Kubernetes cluster with the KubeRay operator take this manifest? Asked without either of them.

Four judges, each of which says `path: what is wrong`: the operator's CustomResourceDefinition made strict,
Kubernetes' own schemas, Serve's schema together with our configuration, and those of the operator's and the
API server's further checks that our manifests could fail.
"""

from __future__ import annotations

import functools
import gzip
import json
import re
import warnings
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from pydantic import BaseModel, ValidationError
from pydantic.warnings import PydanticDeprecatedSince20
from referencing import Registry, Resource

from cluster.config import load_config
from protocol.errors import StartupError

KUBERNETES = "1.34"
CRD = Path(__file__).parent / "crds" / "ray.io_rayservices.json.gz"
WITHOUT_SCHEMA = {"ServiceMonitor"}
"""Of the Prometheus operator, whose definitions are not here."""
MAX_NAME_LENGTH = 47
SERVE_CONFIG = "spec.serveConfigV2"

Yaml = dict[str, Any]


def load_all(text: str) -> list[Yaml]:
    """The documents of a file. libyaml reads them several times faster than Python does."""
    return list(yaml.load_all(text, Loader=yaml.CSafeLoader))


def problems(document: Yaml) -> list[str]:
    """What is wrong with one manifest, as `path: reason`."""
    if document["kind"] == "RayService":
        return [*_schema_problems(document), *_serve_problems(document), *_operator_problems(document)]
    if document["kind"] in WITHOUT_SCHEMA:
        return []
    return list(_builtin_problems(document, ""))


def all_problems(text: str) -> list[str]:
    """Those of all documents of a file."""
    return [problem for document in load_all(text) for problem in problems(document)]


def _schema_problems(document: Yaml) -> Iterator[str]:
    for error in _validator().iter_errors(document):
        path = ".".join(map(str, error.absolute_path))
        for unknown in _unknown_keys(error):
            yield f"{path}.{unknown}".lstrip(".") + ": unknown key"
        if error.validator != "additionalProperties":
            yield f"{path}: {error.message[:200]}"
    for path, template in _templates(document):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": template["spec"]}
        yield from _builtin_problems(pod, path)


def _unknown_keys(error: jsonschema.ValidationError) -> list[str]:
    if error.validator != "additionalProperties":
        return []
    return sorted(set(error.instance) - set(error.schema["properties"]))


def _builtin_problems(document: Yaml, where: str) -> Iterator[str]:
    for error in _builtin_validator(document["kind"], document["apiVersion"]).iter_errors(document):
        path = ".".join([*filter(None, [where]), *map(str, error.absolute_path)])
        yield f"{path}: {error.message[:200]}"


def _serve_problems(document: Yaml) -> Iterator[str]:
    config = yaml.safe_load(document["spec"]["serveConfigV2"])
    try:
        _serve_schema().model_validate(config)
    except ValidationError as error:
        for item in error.errors():
            yield f"{SERVE_CONFIG}.{'.'.join(map(str, item['loc']))}: {item['msg']}"
    for number, application in enumerate(config.get("applications", [])):
        for unknown in set(application) - set(_application_keys()):  # Ray ignores them
            yield f"{SERVE_CONFIG}.applications.{number}.{unknown}: unknown key"
        try:
            load_config(None, application.get("args", {}))
        except StartupError as error:
            for line in error.message.splitlines()[1:]:
                yield f"{SERVE_CONFIG}.applications.{number}.args.{line.strip()}"


def _operator_problems(document: Yaml) -> Iterator[str]:
    """As in `validation.go` of the operator, and what its own start command would trip over."""
    name, spec = document["metadata"]["name"], document["spec"]
    if len(name) > MAX_NAME_LENGTH or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield f"metadata.name: must be a DNS label of at most {MAX_NAME_LENGTH} characters"
    if spec.get("upgradeStrategy", {}).get("type") not in {None, "None", "NewCluster"}:
        yield "spec.upgradeStrategy.type: must be NewCluster or None"
    cluster = spec["rayClusterConfig"]
    if cluster.get("authOptions", {}).get("mode") == "token" and "rayVersion" not in cluster:
        yield "spec.rayClusterConfig.rayVersion: token mode needs to know it"
    head = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    if "serve" not in {port["name"] for port in head.get("ports", [])}:
        yield "spec.rayClusterConfig.headGroupSpec.template.spec.containers.0.ports: none is named serve"
    for number, group in enumerate(cluster["workerGroupSpecs"]):
        yield from _group_problems(f"spec.rayClusterConfig.workerGroupSpecs.{number}", group, cluster)
    for path, template in _templates(document):
        yield from _pod_problems(path, template["spec"])


def _group_problems(path: str, group: Yaml, cluster: Yaml) -> Iterator[str]:
    if not cluster.get("enableInTreeAutoscaling") and not {"minReplicas", "maxReplicas"} <= set(group):
        yield f"{path}.maxReplicas: both bounds are needed without the autoscaler"
    if group.get("minReplicas", 0) > group.get("maxReplicas", 0):
        yield f"{path}.minReplicas: is above maxReplicas"
    if not group.get("minReplicas", 0) <= group.get("replicas", 0) <= group.get("maxReplicas", 0):
        yield f"{path}.replicas: is not within minReplicas and maxReplicas"
    resources = group["rayStartParams"].get("resources", "'{}'")
    if not re.fullmatch(r"'\{[^']*\}'", resources) or not isinstance(json.loads(resources[1:-1]), dict):
        yield f"{path}.rayStartParams.resources: must be JSON in single quotes, for a shell"
    if group["template"]["spec"].get("restartPolicy") not in {None, "Never"}:
        yield f"{path}.template.spec.restartPolicy: must be Never for autoscaler v2"


def _pod_problems(path: str, spec: Yaml) -> Iterator[str]:
    volumes = {volume["name"] for volume in spec.get("volumes", [])}
    for kind in ("initContainers", "containers"):
        for number, container in enumerate(spec.get(kind, [])):
            here = f"{path}.spec.{kind}.{number}"
            for mount in container.get("volumeMounts", []):
                if mount["name"] not in volumes:
                    yield f"{here}.volumeMounts: there is no volume {mount['name']!r}"
            limits, requests = (container["resources"].get(key, {}) for key in ("limits", "requests"))
            for device in (key for key in {*limits, *requests} if "/" in key):
                if limits.get(device) != requests.get(device):
                    yield f"{here}.resources.requests.{device}: of devices as many as in limits"


def _templates(document: Yaml) -> Iterator[tuple[str, Yaml]]:
    cluster = document["spec"]["rayClusterConfig"]
    yield "spec.rayClusterConfig.headGroupSpec.template", cluster["headGroupSpec"]["template"]
    for number, group in enumerate(cluster["workerGroupSpecs"]):
        yield f"spec.rayClusterConfig.workerGroupSpecs.{number}.template", group["template"]


def _serve_schema() -> type[BaseModel]:
    return _ray_schemas()[0]


def _application_keys() -> Iterable[str]:
    return _ray_schemas()[1].model_fields


@functools.cache
def _ray_schemas() -> tuple[type[BaseModel], type[BaseModel]]:
    """Ray's own models warn of how they are written when they are imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PydanticDeprecatedSince20)
        from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema
    return ServeDeploySchema, ServeApplicationSchema


@functools.cache
def _builtin_validator(kind: str, api_version: str) -> jsonschema.Draft202012Validator:
    """Of `kubernetes-validate --strict`, which itself would read its files anew for each document."""
    (folder,) = (resources.files("kubernetes_validate") / "kubernetes-json-schema").glob(  # type: ignore[attr-defined]
        f"v{KUBERNETES}.*-local-strict"
    )
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    return jsonschema.Draft202012Validator(
        json.loads((folder / f"{kind.lower()}-{group}.json").read_text(encoding="utf-8")),
        registry=_builtin_definitions(folder),
    )


@functools.cache
def _builtin_definitions(folder: Path) -> Registry[Any]:
    definitions = json.loads((folder / "_definitions.json").read_text(encoding="utf-8"))
    return Resource.from_contents(definitions) @ Registry()


@functools.cache
def _validator() -> jsonschema.Draft202012Validator:
    """The RayService schema, for documents as they are before the API server fills defaults in."""
    definition = json.loads(gzip.decompress(CRD.read_bytes()))
    (version,) = (version for version in definition["spec"]["versions"] if version["storage"])
    schema = _strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # the API server's own
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return jsonschema.Draft202012Validator(schema)


def _strict(schema: Yaml) -> Yaml:
    """The JSON schema of a Kubernetes schema, with unknown keys refused. Changes it in place."""
    if schema.pop("x-kubernetes-int-or-string", False):
        schema.pop("type", None)
        text = {"type": "string", **({"pattern": schema.pop("pattern")} if "pattern" in schema else {})}
        schema["anyOf"] = [{"type": "integer"}, text]
    if schema.pop("nullable", False):
        schema["type"] = [schema["type"], "null"]
    properties = schema.get("properties", {})
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if properties and not is_open:
        schema["additionalProperties"] = False
    if "required" in schema:
        schema["required"] = [key for key in schema["required"] if "default" not in properties.get(key, {})]
    schema.pop("format", None)
    for inner in (*properties.values(), schema.get("items"), schema.get("additionalProperties")):
        if isinstance(inner, dict):
            _strict(inner)
    return schema
