"""Is /dev/shm large enough for Ray's object store and for UCX?"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from cluster.doctor.facts import NodeFacts, Seen, Shm
from cluster.doctor.findings import Finding, Findings, Topic, in_words
from cluster.doctor.placement import num_ranks_on

PATH = "/dev/shm"  # noqa: S108
ENGINE_BYTES = 16 * 2**20
"""For one worker: UCX maps 4 MiB per process, and more with its peers. A full /dev/shm is a bus error."""
CHECK = "shm"


class FileSystem(Protocol):
    """Part of what `os.statvfs` returns."""

    @property
    def f_frsize(self) -> int: ...
    @property
    def f_blocks(self) -> int: ...
    @property
    def f_bavail(self) -> int: ...


def probe_shm(statvfs: Callable[[str], FileSystem] = os.statvfs) -> Shm:
    found = statvfs(PATH)
    return Shm(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def check_shm(seen: Seen) -> Findings:
    for node in seen.nodes:
        if node.shm is not None:
            yield _check_node(seen, node, node.shm)


def _check_node(seen: Seen, node: NodeFacts, shm: Shm) -> Finding:
    topic = Topic(node.name, CHECK)
    what = f"{PATH}: {in_words(shm.free_bytes)} free of {in_words(shm.total_bytes)}"
    if seen.is_running:
        return topic.ok(f"{what}, beside the running workers")
    engines_bytes = ENGINE_BYTES * max(1, num_ranks_on(seen, node))
    store_bytes = seen.config.ray.object_store_bytes if seen.is_one_machine else 0
    needed = in_words(engines_bytes + store_bytes)
    todo = f"give the container {needed} or more: --shm-size, or an emptyDir of medium Memory at {PATH}"
    if shm.free_bytes < engines_bytes:
        return topic.problem(f"{what}, too little for UCX: workers would die of a bus error", todo)
    if shm.free_bytes < engines_bytes + store_bytes:
        return topic.warning(f"{what}, too little for Ray's object store, which goes to /tmp then", todo)
    return topic.ok(what)
