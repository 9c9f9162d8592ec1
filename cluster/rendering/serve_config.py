"""What does Serve get? A Serve config file: what `serve deploy` takes, and KubeRay's `serveConfigV2`."""

from __future__ import annotations

from typing import Any

from cluster.config import ClusterConfig
from cluster.rendering.clustered import clustered

IMPORT_PATH = "cluster.application:from_arguments"
APPLICATION = "splitserve"


def serve_config(config: ClusterConfig) -> dict[str, Any]:
    """The Serve config file of a cluster that runs `config`, as YAML has it."""
    here = clustered(config)
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": here.http.host, "port": here.http.port},
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": serve_arguments(here),
            }
        ],
    }


def serve_arguments(config: ClusterConfig) -> dict[str, Any]:
    """What `config` says and the defaults do not; how it is deployed is no part of it."""
    arguments: dict[str, Any] = config.model_dump(mode="json", exclude_defaults=True, exclude={"deploy"})
    return arguments
