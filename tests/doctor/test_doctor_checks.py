"""What is said of several nodes, of what runs, and how it is shown."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_kit import ACTIVE_PORT, bad, healthy_node, seen, the_only
from rich.console import Console
from worker_fakes import D0, FINGERPRINT

from cluster.config import load_config
from cluster.doctor import Diagnosis, Finding, Severity, as_json, exit_code, print_table
from cluster.doctor.doctor import as_deployed, check_all, examine
from cluster.doctor.facts import (
    BlockRead,
    Clock,
    Live,
    Model,
    NodeFacts,
    Rdma,
    Service,
    Ucx,
    Versions,
    WorkerAnswer,
)
from cluster.doctor.node import ThisNode
from cluster.doctor.read_plan import ReadPlan, pairs_of
from cluster.doctor.versions import NEEDED
from cluster.serve_state import write_deployment
from protocol.errors import TransferFailed
from protocol.ids import Role
from protocol.membership import WorkerRecord

RAY = {"ray__address": "10.0.0.1:6379", "prefill__host": "auto", "decode__host": "auto"}
READ = BlockRead("n0", "n1", 64, 2**20, 0.1, 0.02, "tcp/eth0", "1.23.0")


def versions(**changes: str) -> Versions:
    return Versions("3.11.7", dict.fromkeys(NEEDED, "1") | changes)


def test_what_differs_between_nodes_is_told_once() -> None:
    nodes = (
        healthy_node("n0", versions=versions()),
        healthy_node("n1", versions=versions(ray="2", nixl="2")),
    )
    found = bad(check_all(seen(*nodes, **RAY)))
    assert [(f.severity, f.what) for f in found] == [
        (Severity.PROBLEM, "ray differs: 1 on n0, 2 on n1"),
        (Severity.WARNING, "nixl differs: 1 on n0, 2 on n1"),
    ]


def test_models_that_differ_between_nodes() -> None:
    models = (Model("/m", "ready", revision, 1) for revision in ("aaaaaaaaaa", "bbbbbbbbbb"))
    nodes = [healthy_node(f"n{i}", model=model) for i, model in enumerate(models)]
    finding = the_only(check_all(seen(*nodes, **RAY)), Severity.PROBLEM)
    assert finding.what == "the model differs: aaaaaaaa on n0, bbbbbbbb on n1"


def test_a_clock_that_is_wrong_is_worth_a_word_and_no_more() -> None:
    nodes = healthy_node("n0"), healthy_node("n1", clock=Clock(0.0, skew_s=7.0, round_trip_s=0.1))
    found = check_all(seen(*nodes, **RAY))
    assert not bad(found)
    assert "+7.00 s from this machine's clock (within 0.05 s)" in [f.what for f in found]


def test_pools_that_do_not_fit_on_the_nodes() -> None:
    nodes = [healthy_node(f"n{i}", resources={"CPU": 4.0, "decode_host": 1.0}) for i in range(2)]
    changes = {"prefill__num_workers": 3, "prefill__resources": {"prefill_host": 1}, "decode__num_cpus": 4}
    finding = the_only(check_all(seen(*nodes, **RAY, **changes)), Severity.PROBLEM)
    assert finding.where == "prefill pool"
    assert finding.what == ("3 workers ask for CPU 1, prefill_host 1 each, and the nodes have room for 0")


@pytest.mark.parametrize(("strategy", "has_room"), [("PACK", True), ("STRICT_PACK", False)])
def test_ranks_of_one_worker_may_be_on_several_nodes_unless_that_is_forbidden(
    strategy: str, has_room: bool
) -> None:
    nodes = [healthy_node(f"n{i}", resources={"CPU": 3.0}) for i in range(2)]
    changes = {
        "tensor_parallel_size": 2,
        "prefill__num_workers": 3,
        "prefill__placement_strategy": strategy,
    }
    found = [f for f in bad(check_all(seen(*nodes, **RAY, **changes))) if f.where == "prefill pool"]
    assert [f.what for f in found] == (
        [] if has_room else ["3 workers ask for 2 x (CPU 1) each, and the nodes have room for 2"]
    )


def test_a_pool_that_follows_its_load_needs_room_for_its_least_number() -> None:
    nodes = [healthy_node(f"n{i}", resources={"CPU": 2.0}) for i in range(2)]
    scaling = {"prefill__num_cpus": 0, "decode__num_workers": 99, "decode__autoscaling__min_workers": 2}
    found = check_all(seen(*nodes, **RAY, **scaling, decode__autoscaling__max_workers=8))
    assert not bad(found)
    assert [f.what for f in found if f.where == "decode pool"] == [
        "CPU 1 each: the pool may grow to 8 workers, and the nodes have room for 4"
    ]


class NodeOfRay(ThisNode):
    """Without probes; Ray counts what it offers."""

    def __init__(self, name: str, offered: dict[str, float]) -> None:
        super().__init__(name, load_config(None), probes={})
        self._offered = offered

    def examine(self) -> NodeFacts:
        return NodeFacts(self.name, resources=self._offered)

    def own_blocks(self, plan: ReadPlan) -> str:
        raise TransferFailed("not in this test")


def test_nodes_that_wait_for_splitserve_deploy_are_judged_as_it_will_use_them() -> None:
    """It makes workers listen on their node's own address, and places them by resources of its own."""
    nodes = [NodeOfRay(role.value, {"CPU": 4.0, f"splitserve_{role}": 1.0}) for role in Role]
    diagnosis = examine(load_config(None, {"ray.address": "auto"}), nodes, Live(), lambda text: None)
    assert [f.what for f in diagnosis.findings if f.check == "placement"] == [
        "1 worker(s), CPU 1, splitserve_prefill 1 each, fit on prefill",
        "1 worker(s), CPU 1, splitserve_decode 1 each, fit on decode",
    ]
    assert not [f for f in diagnosis.findings if f.check == "host"]


def test_what_was_deployed_is_judged_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the head node the deployed file is enough: all nodes are looked at, as with --ray-address."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = load_config(None)
    assert as_deployed(config) is config
    write_deployment(config, "127.0.0.1:1", "secret")
    here = as_deployed(config)
    assert (here.ray.address, here.decode.host) == ("127.0.0.1:1", "auto")
    assert here.decode.resources == {"splitserve_decode": 1.0}


def test_workers_on_loopback_of_several_nodes() -> None:
    nodes = [healthy_node(f"n{i}", resources={"CPU": 4.0}) for i in range(2)]
    found = bad(check_all(seen(*nodes, ray__address="10.0.0.1:6379")))
    assert [f.check for f in found] == ["host", "host"]
    assert found[0].todo == "set prefill.host to auto, which is each node's own address"


def test_blocks_are_read_from_where_prefill_runs_to_where_decode_runs() -> None:
    nodes = [
        healthy_node("head", resources={"CPU": 0.0}),
        healthy_node("p", resources={"CPU": 4.0, "p": 1.0}),
        healthy_node("d", resources={"CPU": 4.0, "d": 1.0}),
    ]
    changes = {"prefill__resources": {"p": 1}, "decode__resources": {"d": 1}}
    assert pairs_of(seen(*nodes, **RAY, **changes)) == [("p", "d")]
    assert pairs_of(seen(*nodes[1:], **RAY)) == [("d", "p"), ("p", "d")]
    assert pairs_of(seen(nodes[1])) == [("p", "p")]
    assert pairs_of(seen(healthy_node("p", failures={"node": "gone"}))) == []


def test_many_nodes_read_from_one_each() -> None:
    pairs = pairs_of(seen(*(healthy_node(f"n{i}", resources={"CPU": 9.0}) for i in range(8)), **RAY))
    assert len(pairs) == 8
    assert all(owner != reader for owner, reader in pairs)


def test_tcp_between_nodes_is_a_fall_back_only_where_both_have_rdma() -> None:
    plain = healthy_node("n0"), healthy_node("n1")
    assert not bad(check_all(seen(*plain, reads=[READ], **RAY)))
    rdma = [healthy_node(f"n{i}", rdma=Rdma((ACTIVE_PORT,))) for i in range(2)]
    finding = the_only(check_all(seen(*rdma, reads=[READ], **RAY)), Severity.WARNING)
    assert finding.where == "n0 -> n1"
    assert "3.1 GiB/s over tcp/eth0" in finding.what
    assert "fell back to TCP where RDMA should be" in finding.what


def test_what_ucx_is_told_is_held_against_what_is_there() -> None:
    told = {"UCX_NET_DEVICES": "mlx5_9:1", "UCX_TLS": "rc,sm"}
    finding = the_only(check_all(seen(healthy_node(ucx=Ucx(told, ("eth0",))))), Severity.PROBLEM)
    assert finding.what == "UCX_NET_DEVICES names mlx5_9:1, and there are only eth0"
    without_sm = healthy_node(ucx=Ucx({"UCX_TLS": "^sm"}, ("eth0",)))
    assert "leaves out shared memory" in the_only(check_all(seen(without_sm)), Severity.WARNING).what
    on_loopback = [healthy_node(f"n{i}", ucx=Ucx({"UCX_NET_DEVICES": "lo"}, ("lo",))) for i in range(2)]
    assert {f.severity for f in bad(check_all(seen(*on_loopback, **RAY)))} == {Severity.PROBLEM}


def test_a_port_is_no_problem_while_our_own_server_holds_it() -> None:
    node = healthy_node(http_port_problem="port 8000 on 127.0.0.1 is taken; choose another")
    records = [
        WorkerRecord(D0, role, "10.0.0.1:1", FINGERPRINT, max_model_len=10)
        for role in (Role.PREFILL, Role.DECODE)
    ]
    live = Live("here", tuple(WorkerAnswer(record, record) for record in records))
    assert not bad(check_all(seen(node, live=live)))
    assert the_only(check_all(seen(node)), Severity.PROBLEM).what == "port 8000 on 127.0.0.1 is taken"


def test_a_role_that_is_missing_and_a_service_that_is_not_ready() -> None:
    record = WorkerRecord(D0, Role.DECODE, "10.0.0.1:1", FINGERPRINT, max_model_len=10)
    live = Live("here", (WorkerAnswer(record, record),), ("10.0.0.9",), Service("http://h:1", True, False))
    found = bad(check_all(seen(live=live)))
    assert [f.what.split(":")[0] for f in found] == [
        "the router answers, but no hand-off from prefill to decode succeeded lately",
        "this node left the Ray cluster",
        "no prefill worker lives",
    ]


def test_workers_cannot_be_asked_without_a_token() -> None:
    record = WorkerRecord(D0, Role.DECODE, "10.0.0.1:1", FINGERPRINT, max_model_len=10)
    live = Live("here", (WorkerAnswer(record, None),), knows_token=False)
    assert "SPLITSERVE_CLUSTER_TOKEN" in the_only(check_all(seen(live=live)), Severity.PROBLEM).todo


def diagnosis(*findings: Finding) -> Diagnosis:
    return Diagnosis(seen(reads=[READ]), findings)


PROBLEM = Finding(Severity.PROBLEM, "n0", "port", "it is taken", "choose another")
FINE = Finding(Severity.OK, "n0", "model", "files are whole")


def test_the_table_names_each_place_once_and_ends_with_a_verdict() -> None:
    out = io.StringIO()
    elsewhere = Finding(Severity.WARNING, "n1", "shm", "small", "enlarge it")
    print_table(diagnosis(PROBLEM, elsewhere, FINE), Console(file=out))
    assert out.getvalue().splitlines() == [
        "n0",
        "  problem  port   it is taken",
        "                  -> choose another",
        "  ok       model  files are whole",
        "n1",
        "  warning  shm    small",
        "                  -> enlarge it",
        "",
        "1 problem, 1 warning: something would go wrong",
    ]


def test_json_holds_findings_facts_and_the_exit_code() -> None:
    document = json.loads(as_json(diagnosis(PROBLEM)))
    assert document["worst"] == "problem"
    assert document["exit_code"] == exit_code([PROBLEM]) == 1
    assert document["findings"][0]["todo"] == "choose another"
    assert document["nodes"][0]["shm"]["free_bytes"] > 0
    assert document["reads"][0]["transport"] == "tcp/eth0"
    assert exit_code([FINE]) == 0


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = "import sys; from cluster.cli import main; sys.argv[0] = 'splitserve'; main()"
    return subprocess.run(
        [sys.executable, "-c", command, "doctor", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_a_bad_configuration_is_bad_usage() -> None:
    run = doctor("--set", "decode.num_wrokers=2")
    assert run.returncode == 2
    assert "decode.num_workers" in run.stderr


def test_the_command_finds_a_wrong_model_and_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    """All of it, with a real read between two processes."""
    run = doctor("--set", "model=/nowhere", "--ray-address", "127.0.0.1:1", "--port", "0", "--json")
    assert run.returncode == 1, run.stderr
    document = json.loads(run.stdout)
    problems = {f["what"] for f in document["findings"] if f["severity"] == "problem"}
    assert problems == {
        "there is no model at '/nowhere'",
        "no Ray cluster answers at 127.0.0.1:1: Connection refused",
    }
    (read,) = document["reads"]
    assert read["transport"]
    assert read["bytes_per_s"] > 0
