"""Does a change of the configuration replace the replicas of a deployment?"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from importlib import metadata

from cluster.config import ClusterConfig
from protocol.ids import Role

_OF_NO_REPLICA = {"start_timeout_s", "drain_limit_s", "ray", "deploy"}
_READ_BY = {
    "router": {"http", "router"},
    "prefill": {"prefill", "kv_transfer", "ranks"},
    "decode": {"decode", "kv_transfer", "ranks"},
}
"""Sections that only some deployments read; the rest is read by all of them."""
_LAYOUT = {"tensor_parallel_size", "pipeline_parallel_size"}
"""Of one pool what it says itself, else what the cluster says; of no router."""


def version_of(deployment: str, config: ClusterConfig, token: str) -> str:
    """Equal when replicas that run need not be replaced. How many workers there are is no part of it."""
    sections = set().union(*_READ_BY.values())
    unread = (sections - _READ_BY[deployment]) | _OF_NO_REPLICA | _LAYOUT
    read = config.model_dump(mode="json", exclude=unread)
    for role in Role:
        if pool := read.get(role.value):
            pool.pop("num_workers")
            # Replicas that Serve started without autoscaling would never tell it their signals.
            pool["autoscaling"] = pool["autoscaling"]["max_workers"] is not None
            pool |= asdict(config.layout_of(config.pool(role)))
    text = json.dumps([metadata.version("splitserve"), token, read], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
