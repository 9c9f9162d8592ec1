"""A cluster of plain processes without Ray: for soaks, fault tests, and hosts that are network namespaces.

    async with ProcessCluster(config) as cluster:      # directory, workers: processes; the router: here
        async with cluster.http() as url: ...          # OpenAI API
        cluster.kill("prefill-0")                      # kill -9; is replaced by itself
        await cluster.wait_until_replaced("prefill-0", timeout_s=10)
        cluster.pause("decode-0"); cluster.resume("decode-0")      # SIGSTOP, SIGCONT
        await cluster.drain("decode-1", limit_s=30)    # over gRPC, as `splitserve drain` does
        cluster.workers()                              # names, pids, incarnations, addresses, log files
        await cluster.wait_until_idle(timeout_s=20)    # every process's own leak check, and the router's

Names are "directory", "prefill-0", ..., "decode-0", ...; they stay while incarnations change. A process
that ends, that says it is unfit, or that does not answer for `health_timeout_s` is killed and replaced.
Workers are forked from one warm process that has torch, gRPC and NIXL loaded, so that a replacement is
there within about a second; those placed in a network namespace are started from scratch.
"""

from __future__ import annotations
