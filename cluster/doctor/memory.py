"""Is there memory for the weights and the KV of all engines that a node is to run?"""

from __future__ import annotations

from pathlib import Path

import psutil

from cluster.config import ClusterConfig, PoolConfig
from cluster.doctor.facts import Memory, NodeFacts, Seen
from cluster.doctor.findings import Finding, Findings, Topic, in_words
from cluster.doctor.placement import ranks_on
from cluster.preflight import least_block_bytes, least_element_bytes
from engine.model.config import ModelConfig
from protocol.errors import StartupError
from protocol.ids import Role

CGROUP = Path("/sys/fs/cgroup")
PROCESS_BYTES = 400 * 2**20
"""A worker beside weights and KV: Python, torch, gRPC, NIXL."""
CLUSTER_BYTES = 1000 * 2**20
"""Ray's own processes, Serve's controller and the router of a local cluster."""
CHECK = "memory"


def probe_memory(cgroup: Path = CGROUP) -> Memory:
    """What is available, or what the container may still use where that is less."""
    found = psutil.virtual_memory()
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None or limit >= found.total:
        return Memory(found.total, found.available)
    return Memory(limit, min(found.available, max(0, limit - used)))


def _number(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def kv_bytes(config: ClusterConfig, pool: PoolConfig, model: ModelConfig) -> int:
    """KV blocks of one rank, none where it takes a share of what is free, and its memory for swapping."""
    swap = int(pool.swap_memory) if pool.preemption == "swap" else 0
    if pool.num_blocks is not None:
        return pool.num_blocks * least_block_bytes(config, pool, model) + swap
    return swap + (0 if pool.kv_cache_share is not None else int(pool.kv_cache_memory))


def check_memory(seen: Seen) -> Findings:
    for node in seen.nodes:
        if node.model is None or not node.model.config:
            continue
        try:
            model = ModelConfig.from_hf(dict(node.model.config))
        except StartupError:
            continue  # the model's own check says it
        yield from _check_node(seen, node, model, node.model.num_parameters)


def _check_node(seen: Seen, node: NodeFacts, model: ModelConfig, num_parameters: int) -> Findings:
    host_bytes = CLUSTER_BYTES if seen.is_one_machine else 0
    parts = []
    for role, number in ranks_on(seen, node).items():
        pool = seen.config.pool(role)
        num_ranks = seen.config.layout_of(pool).num_ranks
        weights = num_parameters * least_element_bytes(seen.config, pool) // num_ranks
        engine = weights + kv_bytes(seen.config, pool, model)
        host_bytes += number * PROCESS_BYTES
        if pool.num_gpus:
            yield from _check_gpus(node, role, engine)
        elif number:
            host_bytes += number * engine
            parts.append(
                f"{number} {role} x ({in_words(weights)} weights + {in_words(engine - weights)} KV)"
            )
    if node.memory is not None:
        yield _check_host(seen, node, node.memory, host_bytes, " + ".join(parts))


def _check_host(seen: Seen, node: NodeFacts, memory: Memory, needed: int, parts: str) -> Finding:
    topic = Topic(node.name, CHECK)
    what = f"{in_words(memory.available_bytes)} of {in_words(memory.total_bytes)} available"
    if seen.is_running:
        return topic.ok(f"{what}, beside the running workers")
    wanted = f"about {in_words(needed)} needed" + (f": {parts}, and the processes" if parts else "")
    if needed > memory.available_bytes:
        return topic.problem(
            f"{what}, {wanted}",
            "lower kv_cache_memory, num_blocks or num_workers of a pool, or take a smaller model or dtype",
        )
    return topic.ok(f"{what}, {wanted}")


def _check_gpus(node: NodeFacts, role: Role, engine_bytes: int) -> Findings:
    free = [gpu.free_bytes for gpu in (node.gpus.devices if node.gpus else ()) if gpu.total_bytes]
    if free and engine_bytes > max(free):
        yield Topic(node.name, CHECK).problem(
            f"an engine of {role} needs about {in_words(engine_bytes)}, and no GPU has more than"
            f" {in_words(max(free))} free",
            f"lower {role}.kv_cache_memory or num_blocks, or end what uses the GPUs (nvidia-smi lists it)",
        )
