"""How many threads does an engine compute with? Two engines on one machine must share its cores."""

from __future__ import annotations

import os

from cluster.config import ClusterConfig, PoolConfig


def threads_per_engine(config: ClusterConfig, pool: PoolConfig) -> int:
    """Threads for one engine of `pool`.

    'auto' divides this machine's cores between all engines when the cluster is local, and takes what
    Ray reserved for the worker otherwise. Oversubscribed engines lose half their speed to spinning.
    """
    if isinstance(pool.threads, int):
        return pool.threads
    if config.ray.address is not None:
        return max(1, int(pool.num_cpus))
    num_engines = config.prefill.most_num_workers + config.decode.most_num_workers
    return max(1, len(os.sched_getaffinity(0)) // num_engines)
