"""`splitserve deploy` without a cluster: a laptop's configuration on hosts, the token, what is told."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from cluster.attachment import Attachment, find_cluster
from cluster.cluster_token import cluster_token, kept_token
from cluster.config import ClusterConfig, load_config
from cluster.deploy_command import (
    deploy_cluster,
    missing_nodes,
    server_of_its_own,
    warnings_of_deployment,
    what_was_kept,
)
from cluster.rendering import for_deployment
from cluster.rendering.clustered import ON_HEAD
from cluster.serve_progress import Report
from cluster.serve_state import read_state, write_deployment, write_start, write_state
from protocol.errors import StartupError, WorkerUnavailable
from protocol.handoff import Fingerprint
from protocol.ids import Role, WorkerId, WorkerIdentity
from protocol.membership import Load, WorkerRecord


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SPLITSERVE_CLUSTER_TOKEN", raising=False)
    return tmp_path / "splitserve" / "run"


def config(**changes: object) -> ClusterConfig:
    return load_config(None, {key.replace("__", "."): value for key, value in changes.items()})


def test_a_laptops_configuration_is_made_fit_for_several_hosts() -> None:
    here = for_deployment(config())
    assert (here.http.host, here.http.through) == ("0.0.0.0", "router")  # noqa: S104
    assert here.router.resources == ON_HEAD
    assert (here.prefill.host, here.decode.host) == ("auto", "auto")
    assert here.prefill.resources == {"splitserve_prefill": 1.0}
    assert here.ray.address == "auto"


def test_what_the_configuration_says_itself_stays() -> None:
    here = for_deployment(
        config(
            ray__address="h:6379", router__resources={"front": 1}, http__host="10.0.0.1", decode__host="d"
        )
    )
    assert here.ray.address == "h:6379"
    assert here.router.resources == {"front": 1}
    assert (here.http.host, here.decode.host) == ("10.0.0.1", "d")


@pytest.mark.parametrize("runs", [True, False], ids=["runs", "starts yet"])
def test_the_word_of_a_server_on_the_same_port_is_not_taken_for_a_deployments(runs: bool) -> None:
    here = config(ray__address="127.0.0.1:1")
    if runs:
        write_state(here, "127.0.0.1:1", ray_token="", cluster_token="")
    else:
        write_start(here)
    with pytest.raises(StartupError, match=r"`splitserve serve` \(pid \d+\) has port 8000"):
        deploy_cluster(here, Report())
    assert server_of_its_own(here) is not None
    write_deployment(here, "127.0.0.1:1", "token")
    assert server_of_its_own(here) is None


def test_routers_behind_proxies_run_anywhere() -> None:
    here = for_deployment(config(http__through="proxy"))
    assert here.http.through == "proxy"
    assert here.router.resources == {}


def test_the_cluster_token_is_drawn_once_and_kept_private(run_dir: Path) -> None:
    assert kept_token() is None
    token = cluster_token()
    assert cluster_token() == kept_token() == token
    assert stat.S_IMODE((run_dir / "cluster-token").stat().st_mode) == 0o600


def test_a_token_of_the_environment_is_taken_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITSERVE_CLUSTER_TOKEN", "of the environment")
    assert cluster_token() == "of the environment"
    assert kept_token() is None


def test_a_token_that_cannot_be_kept_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    with pytest.raises(StartupError, match="SPLITSERVE_CLUSTER_TOKEN"):
        cluster_token()


def test_commands_find_what_was_deployed_from_here() -> None:
    write_deployment(config(), "10.0.0.1:6379", "secret")
    state = read_state(config())
    assert state is not None
    assert state.is_deployed
    assert find_cluster(config()) == Attachment("10.0.0.1:6379", "secret")


def test_the_kept_token_opens_a_cluster_that_is_named() -> None:
    token = cluster_token()
    assert find_cluster(config(ray__address="auto")) == Attachment("auto", token)


def test_a_ray_cluster_that_is_gone_is_not_waited_for() -> None:
    with (
        pytest.raises(WorkerUnavailable, match="no Ray cluster answers"),
        Attachment("127.0.0.1:1", None).joined(),
    ):
        pass


def test_workers_that_run_on_are_counted() -> None:
    before = [record(Role.PREFILL, "p"), record(Role.DECODE, "d"), record(Role.DECODE, "e")]
    after = [record(Role.PREFILL, "q"), record(Role.DECODE, "d"), record(Role.DECODE, "f")]
    assert what_was_kept(before, after) == ["prefill: 0 run on, 1 new", "decode: 1 run on, 1 new"]


def record(role: Role, worker_id: str) -> WorkerRecord:
    fingerprint = Fingerprint("m", "r", "float32", "float32", 2, 2, 16, 16)
    identity = WorkerIdentity(WorkerId(worker_id), "1")
    return WorkerRecord(identity, role, "127.0.0.1:1", fingerprint, max_model_len=64, load=Load())


def test_a_pool_that_no_node_has_a_place_for_is_named() -> None:
    (line,) = missing_nodes(for_deployment(config()), {"splitserve_decode": 2.0, "CPU": 4.0})
    assert line.startswith("prefill waits for a node that offers splitserve_prefill")


def test_an_open_port_without_a_key_is_worth_a_word(tmp_path: Path) -> None:
    assert "no API key" in warnings_of_deployment(for_deployment(config()))[0]
    assert warnings_of_deployment(for_deployment(config(http__api_key_file=str(tmp_path / "key")))) == []
