"""How many threads does a rank compute with? All engines and ranks on one machine must share its cores."""

from __future__ import annotations

import os

from cluster.config import ClusterConfig, PoolConfig


def threads_per_rank(config: ClusterConfig, pool: PoolConfig) -> int:
    """Threads for each rank of an engine of `pool`.

    'auto' divides this machine's cores between all ranks when the cluster is local, and takes what
    Ray reserved for the rank otherwise. Oversubscribed engines lose half their speed to spinning.
    """
    if isinstance(pool.threads, int):
        return pool.threads
    if config.ray.address is not None:
        return max(1, int(pool.num_cpus))
    num_ranks = sum(
        p.most_num_workers * config.layout_of(p).num_ranks for p in (config.prefill, config.decode)
    )
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)
