"""How does a deployment keep its own version, whichever way Serve gets to know it?

A Serve config file (`serve deploy`, KubeRay) makes Serve build the application anew and give all its
deployments one version: the hash of import path and arguments. So any changed argument would replace all
replicas, routers with their clients' streams included. There is no setting for it in Ray 2.60.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from ray import serve
from ray.serve._private.config import DeploymentConfig


class _OptionsWithVersion(DeploymentConfig):
    """The options of a deployment, whose version can be set once."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "version" or self.version is None:
            super().__setattr__(name, value)


def keep_version(deployment: serve.Deployment, version: str) -> None:
    """Serve replaces the deployment's replicas when, and only when, `version` or where they run changes."""
    options = copy(vars(deployment)["_deployment_config"])
    # Its class is exchanged because a copy by value would lose private parts.
    object.__setattr__(options, "__class__", _OptionsWithVersion)
    options.version = version
    vars(deployment)["_deployment_config"] = options
