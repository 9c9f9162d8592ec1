"""Ten things that go wrong in the field: each is planted, as really as is cheap, and must be found."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from doctor_kit import ACTIVE_PORT, DEFAULTS, GIB, bad, healthy_node, probed, seen, the_only, write_model
from worker_fakes import CLUSTER_TOKEN, D0, FINGERPRINT, P0

from cluster.config import load_config
from cluster.doctor.doctor import check_all, examine
from cluster.doctor.facts import Limits, Live, Memory, NodeFacts, Rdma, Versions, WorkerAnswer
from cluster.doctor.findings import Finding, Severity
from cluster.doctor.model import probe_model
from cluster.doctor.node import ThisNode
from cluster.doctor.ports import probe_http_port
from cluster.doctor.read_plan import ReadPlan, pairs_of
from cluster.doctor.read_process import Measured
from cluster.doctor.shm import probe_shm
from cluster.doctor.versions import NEEDED
from cluster.doctor.workers import ask_workers
from protocol.errors import WorkerUnavailable
from protocol.ids import Role
from protocol.membership import WorkerRecord
from protocol.wire.splitserve_pb2_grpc import add_WorkerAdminServicer_to_server
from rpc import AdminService, start_server

ROOT = Path(__file__).resolve().parents[2]
DECODE = WorkerRecord(D0, Role.DECODE, "127.0.0.1:1", FINGERPRINT, max_model_len=128)


def test_wrong_model_path() -> None:
    config = load_config(None, {"model": "/no/such/model"})
    finding = the_only(probed(config, model=partial(probe_model, config)), Severity.PROBLEM)
    assert finding.what == "there is no model at '/no/such/model'"
    assert finding.todo.startswith("pass a model folder")


def test_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        config = load_config(None, {"http.port": other.getsockname()[1]})
        found = probed(config, http_port_problem=partial(probe_http_port, config))
    finding = the_only(found, Severity.PROBLEM)
    assert "is taken" in finding.what
    assert f"--port {config.http.port + 1}" in finding.todo


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
from cluster.config import load_config
from cluster.doctor.doctor import check_all
from cluster.doctor.facts import Seen
from cluster.doctor.limits import probe_limits
from cluster.doctor.node import run_probes
for finding in check_all(Seen(load_config(None), (run_probes("n0", {"limits": probe_limits}),))):
    print(finding.severity, finding.check, finding.what, "->", finding.todo)
"""


def test_memlock_of_64_kib() -> None:
    """Really set: the probe runs in a process that may lock no more."""
    said = subprocess.run(
        [sys.executable, "-c", LIMITED], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "warning memlock only 64 KiB of memory may be locked" in said
    assert "-> ulimit -l unlimited" in said


def test_memlock_of_64_kib_beside_rdma_devices_is_worse() -> None:
    node = healthy_node(limits=Limits(65536, 65536, 65536), rdma=Rdma((ACTIVE_PORT,)))
    assert "cannot be registered" in the_only(check_all(seen(node)), Severity.PROBLEM).what


@pytest.mark.parametrize(("free_mib", "severity"), [(20, Severity.PROBLEM), (64, Severity.WARNING)])
def test_shm_that_is_too_small(free_mib: int, severity: Severity) -> None:
    """64 MiB is what a container gets unless told otherwise."""
    statvfs = SimpleNamespace(f_frsize=4096, f_blocks=64 * 256, f_bavail=free_mib * 256)
    finding = the_only(probed(DEFAULTS, shm=lambda: probe_shm(lambda path: statvfs)), severity)
    assert f"{free_mib} MiB free of 64 MiB" in finding.what
    assert "--shm-size" in finding.todo


def test_pools_of_unequal_dtype_and_block_size_that_can_be_converted() -> None:
    changes = {"prefill__dtype": "float32", "decode__dtype": "bfloat16", "decode__block_size": 32}
    found = check_all(seen(**changes))
    texts = [f.what for f in found if f.severity is Severity.WARNING]
    assert any("converted on its way" in text for text in texts)
    assert any("blocks of 16 tokens in prefill, of 32 in decode" in text for text in texts)


@pytest.mark.parametrize(
    ("transport", "num_gpus", "what"),
    [("loopback", 0, "one process only"), ("nccl", 0, "a pool has none"), ("gloo", 1, "host memory")],
)
def test_a_transport_that_cannot_move_the_pools(transport: str, num_gpus: int, what: str) -> None:
    changes = {"kv_transfer__transport": transport, "prefill__num_gpus": num_gpus}
    problems = [f for f in check_all(seen(**changes)) if f.severity is Severity.PROBLEM]
    assert any(what in finding.what for finding in problems)
    assert all("nixl" in finding.todo for finding in problems if "transport" in finding.what)


def test_where_kv_moves_by_gloo_nixl_is_neither_needed_nor_tried() -> None:
    packages = dict.fromkeys((name for name in NEEDED if name != "nixl"), "1")
    node = healthy_node(versions=Versions("3.11.7", packages))
    by_gloo = seen(node, kv_transfer__transport="gloo")
    assert not bad(check_all(by_gloo))
    assert not pairs_of(by_gloo)
    assert the_only(check_all(seen(node)), Severity.PROBLEM).what == "not installed: nixl"


def test_pools_of_unequal_models_that_refuse_each_other() -> None:
    other = replace(FINGERPRINT, revision="r2")
    prefill = replace(DECODE, identity=P0, role=Role.PREFILL, fingerprint=other)
    live = Live("here", tuple(WorkerAnswer(record, record) for record in (prefill, DECODE)))
    finding = the_only(check_all(seen(live=live)), Severity.PROBLEM)
    assert "revision: 'r1' here, 'r2' there" in finding.what


def examined(node: ThisNode) -> list[Finding]:
    """With a real read between two processes."""
    return list(examine(DEFAULTS, [node], Live(), lambda text: None).findings)


@pytest.mark.nixl
def test_nixl_that_is_missing(tmp_path: Path) -> None:
    """In processes of its own, where importing it fails."""
    (tmp_path / "nixl.py").write_text("raise ImportError('No module named nixl')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    node = ThisNode("n0", DEFAULTS, probes={}, variables={"PYTHONPATH": path})
    finding = the_only(examined(node), Severity.PROBLEM)
    assert "NIXL cannot be loaded" in finding.what
    assert "pip install" in finding.todo


@pytest.mark.nixl
def test_fall_back_to_tcp() -> None:
    node = ThisNode("n0", DEFAULTS, probes={}, variables={"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"})
    finding = the_only(examined(node), Severity.WARNING)
    assert "over tcp/lo" in finding.what
    assert "fell back to TCP where shared memory" in finding.what


async def test_worker_that_is_dead() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        record = replace(DECODE, address=f"127.0.0.1:{nobody.getsockname()[1]}")
        answers = await ask_workers([record], CLUSTER_TOKEN)
    finding = check_all(seen(live=Live("here", answers)))
    dead = next(f for f in finding if f.severity is Severity.PROBLEM)
    assert dead.where == "decode d0"
    assert f"does not answer at {record.address}" in dead.what


class DeadNode:
    """Takes part in nothing."""

    name = "n1"

    def examine(self) -> NodeFacts:
        raise WorkerUnavailable("no actor runs there")

    def own_blocks(self, plan: ReadPlan) -> str:
        raise AssertionError("a dead node is not read from")

    def read_blocks(self, endpoint: str, plan: ReadPlan) -> Measured:
        raise AssertionError("a dead node does not read")

    def stop(self) -> None:
        pass


def test_node_that_does_not_answer() -> None:
    diagnosis = examine(DEFAULTS, [DeadNode()], Live(), lambda text: None)
    finding = the_only(diagnosis.findings, Severity.PROBLEM)
    assert (finding.where, finding.what) == ("n1", "this node does not answer: no actor runs there")
    assert diagnosis.seen.reads == ()


async def test_wrong_token() -> None:
    """At a real gRPC server of a worker."""
    service = AdminService(lambda: DECODE, None, None, None)  # type: ignore[arg-type]  # only described
    register = partial(add_WorkerAdminServicer_to_server, service)
    server = await start_server([register], "127.0.0.1", 0, CLUSTER_TOKEN)
    record = replace(DECODE, address=f"127.0.0.1:{server.port}")
    try:
        right = await ask_workers([record], CLUSTER_TOKEN)
        wrong = await ask_workers([record], "another token")
    finally:
        await server.stop(0.0)
    assert right[0].answer == DECODE
    findings = check_all(seen(live=Live("here", wrong)))
    finding = next(f for f in findings if f.severity is Severity.PROBLEM)
    assert finding.check == "token"
    assert "SPLITSERVE_CLUSTER_TOKEN" in finding.todo
    assert "another token" not in "".join(f.what + f.todo for f in findings)


def test_too_little_memory(tmp_path: Path) -> None:
    settings = {"model": str(write_model(tmp_path / "tiny")), "decode.kv_cache_memory": "3GiB"}
    config = load_config(None, settings)
    found = probed(
        config,
        model=partial(probe_model, config),
        memory=lambda: Memory(total_bytes=8 * GIB, available_bytes=4 * GIB),
    )
    finding = the_only(found, Severity.PROBLEM)
    assert finding.what.startswith("4 GiB of 8 GiB available, about 5.3 GiB needed")
    assert "3 GiB KV" in finding.what
    assert "kv_cache_memory" in finding.todo
