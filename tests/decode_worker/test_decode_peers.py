"""Connections to owners: made ahead, made once, made anew after a failure, dropped when unused."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from decode_fakes import FakeOwner, FakeReader
from virtual_time import settle, virtual_time
from worker_fakes import D0, FINGERPRINT, P0

from decode_worker.peers import Peers
from protocol.errors import TransferFailed, WorkerUnavailable
from protocol.ids import Role, WorkerId, WorkerIdentity
from protocol.membership import WorkerRecord

P0_AGAIN = WorkerIdentity(P0.worker_id, "p-second")


class Bench:
    """Peers whose owners are fakes by address. To be built on a running loop."""

    def __init__(self) -> None:
        self.reader = FakeReader()
        self.owners: dict[str, FakeOwner] = {}
        self.peers = Peers(
            self._owner,
            self.reader,
            FINGERPRINT,
            connect_timeout_s=5.0,
            forget_after_s=10.0,
            clock=asyncio.get_running_loop().time,
        )

    def _owner(self, address: str) -> FakeOwner:
        return self.owners[address]

    def record(self, identity: WorkerIdentity, role: Role = Role.PREFILL) -> WorkerRecord:
        address = f"{identity}:1"
        self.owners.setdefault(address, FakeOwner(identity))
        return WorkerRecord(identity, role, address, FINGERPRINT, 100)

    def owner(self, identity: WorkerIdentity) -> FakeOwner:
        return self.owners[f"{identity}:1"]


@virtual_time
async def test_owners_of_the_directory_are_connected_ahead_and_once() -> None:
    bench = Bench()
    records = [
        bench.record(P0),
        bench.record(WorkerIdentity(WorkerId("p1"), "x")),
        bench.record(D0, Role.DECODE),
    ]
    await bench.peers.refresh(records)
    await bench.peers.refresh(records)
    assert bench.reader.connected == ["agent-p-first", "agent-x"]
    assert bench.owner(P0).calls == ["connect"]
    assert bench.peers.num_connected == 2
    await bench.peers.close()
    assert bench.reader.connected == []
    assert bench.owner(P0).is_closed


@virtual_time
async def test_handshakes_with_one_owner_never_overlap() -> None:
    bench = Bench()
    record = bench.record(P0)
    with bench.peers.use(P0, record.address) as peer:
        agents = await asyncio.gather(*[peer.connect() for _ in range(5)])
    assert agents == ["agent-p-first"] * 5
    assert bench.owner(P0).calls == ["connect"]


@virtual_time
async def test_unreachable_owner_is_tried_again_and_harms_no_other() -> None:
    bench = Bench()
    records = [bench.record(P0), bench.record(P0_AGAIN)]
    bench.owner(P0).fails_with = WorkerUnavailable("down")
    await bench.peers.refresh(records)
    assert bench.reader.connected == ["agent-p-second"]
    bench.owner(P0).fails_with = None
    await bench.peers.refresh(records)
    assert bench.reader.connected == ["agent-p-second", "agent-p-first"]


@virtual_time
async def test_restarted_worker_is_another_owner_and_the_old_one_is_dropped_later() -> None:
    bench = Bench()
    await bench.peers.refresh([bench.record(P0)])
    await bench.peers.refresh([bench.record(P0_AGAIN)])
    assert bench.reader.connected == ["agent-p-first", "agent-p-second"]
    await asyncio.sleep(11)
    await bench.peers.refresh([bench.record(P0_AGAIN)])
    assert bench.reader.connected == ["agent-p-second"]
    assert bench.owner(P0).is_closed


@virtual_time
async def test_owner_in_use_is_kept_though_the_directory_lost_it() -> None:
    bench = Bench()
    record = bench.record(P0)
    await bench.peers.refresh([record])
    with bench.peers.use(P0, record.address):
        await asyncio.sleep(60)
        await bench.peers.refresh([])
        assert bench.reader.connected == ["agent-p-first"]
    await asyncio.sleep(9)
    await bench.peers.refresh([])
    assert bench.reader.connected == ["agent-p-first"]
    await asyncio.sleep(2)
    await bench.peers.refresh([])
    assert bench.reader.connected == []


@virtual_time
async def test_stale_connection_is_renewed_once_no_read_is_pending() -> None:
    bench = Bench()
    record = bench.record(P0)
    with bench.peers.use(P0, record.address) as peer:
        await peer.connect()
        peer.num_reading += 1
        peer.mark_stale()
        await peer.connect()
        assert bench.owner(P0).calls == ["connect"]
        peer.num_reading -= 1
        await peer.connect()
        await peer.connect()
    assert bench.owner(P0).calls == ["connect", "connect"]
    assert bench.reader.connected == ["agent-p-first"]


@virtual_time
async def test_mismatching_owner_is_never_connected() -> None:
    bench = Bench()
    record = bench.record(P0)
    bench.owner(P0).fingerprint = replace(FINGERPRINT, revision="r2")
    await bench.peers.refresh([record])
    assert bench.reader.connected == []
    assert bench.peers.num_connected == 0


@virtual_time
async def test_stranger_at_the_address_is_refused() -> None:
    bench = Bench()
    record = bench.record(P0)
    bench.owner(P0).identity = P0_AGAIN
    with (
        bench.peers.use(P0, record.address) as peer,
        pytest.raises(TransferFailed, match="p0@p-second now"),
    ):
        await peer.connect()
    assert bench.reader.connected == []


@virtual_time
async def test_handshake_that_hangs_is_given_up_and_tried_again() -> None:
    bench = Bench()
    record = bench.record(P0)
    bench.reader.works.clear()
    with bench.peers.use(P0, record.address) as peer:
        with pytest.raises(TransferFailed, match="took over 5 s"):
            await peer.connect()
        bench.reader.works.set()
        assert await peer.connect() == "agent-p-first"


@virtual_time
async def test_transport_that_hangs_holds_up_neither_a_new_connection_nor_the_end() -> None:
    bench = Bench()
    record = bench.record(P0)
    with bench.peers.use(P0, record.address) as peer:
        await peer.connect()
        peer.mark_stale()
        bench.reader.works.clear()
        with pytest.raises(TransferFailed, match="did not let go of agent-p-first in 5 s"):
            await peer.connect()
    await bench.peers.close()
    assert bench.owner(P0).calls == ["connect"]


@virtual_time
async def test_all_who_wait_for_a_dead_owner_fail_together() -> None:
    """One after the other they would wait for as many time limits as they are."""
    bench = Bench()
    record = bench.record(P0)
    bench.reader.works.clear()
    started_s = asyncio.get_running_loop().time()
    with bench.peers.use(P0, record.address) as peer:
        results = await asyncio.gather(*[peer.connect() for _ in range(7)], return_exceptions=True)
    assert [type(result) for result in results] == [TransferFailed] * 7
    assert bench.owner(P0).calls == ["connect"]
    assert asyncio.get_running_loop().time() - started_s == pytest.approx(5.0, abs=0.1)


@virtual_time
async def test_handshake_goes_on_for_the_others_when_one_stops_waiting() -> None:
    bench = Bench()
    record = bench.record(P0)
    bench.reader.works.clear()
    with bench.peers.use(P0, record.address) as peer:
        impatient, patient = (asyncio.create_task(peer.connect()) for _ in range(2))
        await settle()
        impatient.cancel()
        await settle()
        bench.reader.works.set()
        assert await patient == "agent-p-first"
    assert bench.owner(P0).calls == ["connect"]


@virtual_time
async def test_dead_owner_does_not_hold_up_the_connection_to_a_new_one() -> None:
    bench = Bench()
    dead, alive = bench.record(P0), bench.record(P0_AGAIN)
    bench.owner(P0).greets.clear()
    await asyncio.wait_for(bench.peers.refresh([dead]), timeout=2)
    await asyncio.wait_for(bench.peers.refresh([dead, alive]), timeout=2)
    assert bench.reader.connected == ["agent-p-second"]
    assert bench.owner(P0).calls == ["connect"]
    await asyncio.wait_for(bench.peers.close(), timeout=1)
    assert bench.owner(P0).is_closed


@virtual_time
async def test_trouble_with_an_owner_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    record = bench.record(P0)
    bench.owner(P0).fails_with = WorkerUnavailable("down")
    for _ in range(5):
        await bench.peers.refresh([record])
    assert caplog.text.count("no connection to") == 1
    assert bench.owner(P0).calls == ["connect"] * 5
