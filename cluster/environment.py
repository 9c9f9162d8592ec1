"""The only place that reads environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment says, read once by the process's entry point."""

    cluster_token: str | None
    """Secret that workers and routers show each other; null: one is made for this cluster."""


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Read the variables that Splitserve knows: SPLITSERVE_CLUSTER_TOKEN."""
    return Environment(cluster_token=variables.get("SPLITSERVE_CLUSTER_TOKEN") or None)
