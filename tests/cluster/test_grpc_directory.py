"""The directory over gRPC answers like the one in a process, needs the token, and may be away a while."""

from __future__ import annotations

import pytest
from worker_fakes import CLUSTER_TOKEN, D0, FINGERPRINT, P0

from cluster.directory import ENTRY_LIFETIME_S
from cluster.grpc_directory import GrpcDirectory, serve_directory
from protocol.errors import Unauthorized, WorkerUnavailable
from protocol.ids import Role
from protocol.membership import Load, WorkerRecord

PREFILL = WorkerRecord(P0, Role.PREFILL, "10.0.0.1:1", FINGERPRINT, 100, Load(num_running=3), draining=True)
DECODE = WorkerRecord(D0, Role.DECODE, "10.0.0.2:1", FINGERPRINT, 100)


async def test_what_was_announced_is_listed_until_it_is_withdrawn_or_silent() -> None:
    now = [100.0]
    server = await serve_directory("127.0.0.1", 0, CLUSTER_TOKEN, clock=lambda: now[0])
    directory = GrpcDirectory(server.address, CLUSTER_TOKEN)
    assert await directory.workers() == ()
    await directory.announce(PREFILL)
    await directory.announce(DECODE)
    assert await directory.workers() == (DECODE, PREFILL)
    await directory.withdraw(D0)
    await directory.withdraw(D0)
    assert await directory.workers() == (PREFILL,)
    now[0] += ENTRY_LIFETIME_S + 0.1
    assert await directory.workers() == ()
    await directory.close()
    await server.stop(0)


async def test_a_stranger_is_refused() -> None:
    server = await serve_directory("127.0.0.1", 0, CLUSTER_TOKEN)
    stranger = GrpcDirectory(server.address, "another token")
    with pytest.raises(Unauthorized, match="cluster token"):
        await stranger.workers()
    with pytest.raises(Unauthorized):
        await stranger.announce(DECODE)
    await stranger.close()
    await server.stop(0)


async def test_a_client_finds_the_directory_again_after_its_restart() -> None:
    server = await serve_directory("127.0.0.1", 0, CLUSTER_TOKEN)
    directory = GrpcDirectory(server.address, CLUSTER_TOKEN, timeout_s=10)
    await directory.announce(DECODE)
    await server.stop(0)
    impatient = GrpcDirectory(server.address, CLUSTER_TOKEN, timeout_s=0.05)
    with pytest.raises(WorkerUnavailable, match="the directory at"):
        await impatient.workers()
    await impatient.close()
    again = await serve_directory("127.0.0.1", server.port, CLUSTER_TOKEN)
    await directory.announce(DECODE)
    assert await directory.workers() == (DECODE,)
    await directory.close()
    await again.stop(0)
