"""What the probes read from a system, and that none can hold up or break the others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from doctor_kit import GIB, bad, probed, seen, write_model
from weights_samples import trained_tokenizer, write_folder

from cluster.config import load_config
from cluster.doctor.doctor import check_all
from cluster.doctor.facts import Versions
from cluster.doctor.gpus import parse_topology, probe_gpus
from cluster.doctor.memory import probe_memory
from cluster.doctor.model import probe_model
from cluster.doctor.node import probes_of, run_probes
from cluster.doctor.rdma import probe_rdma
from cluster.doctor.ucx_log import read_transport, ucx_version
from cluster.doctor.versions import probe_versions
from protocol.errors import StartupError

TOPOLOGY = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-7
GPU1\tNV18\t X \tSYS\tSYS\t0-7
GPU2\tSYS\tSYS\t X \tSYS\t0-7
NIC0\tPIX\tSYS\tSYS\t X
"""


def fake_smi(command: Sequence[str]) -> str | None:
    if "topo" in command:
        return TOPOLOGY
    if len(command) == 1:
        return "| NVIDIA-SMI 570.86  Driver Version: 570.86  CUDA Version: 12.8 |"
    return "".join(f"{i}, NVIDIA H100, 81559, 80000, 570.86\n" for i in range(3))


def test_gpus_and_how_they_are_joined() -> None:
    gpus = probe_gpus(fake_smi)
    assert (gpus.driver, gpus.cuda, len(gpus.devices)) == ("570.86", "12.8", 3)
    assert gpus.devices[0].free_bytes == 80000 * 2**20
    assert gpus.links == {"0-1": "NV18", "0-2": "SYS", "1-2": "SYS"}
    found = probed(
        load_config(None, {"decode.num_gpus": 1, "dtype": "float32"}),
        gpus=lambda: gpus,
        versions=lambda: Versions("3.11.7", {**probe_versions().packages, "torch": "2.13.0"}, "13.0"),
    )
    assert [f.what for f in bad(found)] == [
        "torch was built for CUDA 13.0, and the driver runs CUDA up to 12.8"
    ]
    assert "NVLink joins 1 of 3 pairs; not 0-2, 1-2" in [f.what for f in found]


def test_no_nvidia_smi_is_no_gpu_and_a_topology_without_gpus_is_empty() -> None:
    assert probe_gpus(lambda command: None).devices == ()
    assert parse_topology("") == {}


def test_gpus_that_are_asked_for_and_not_there() -> None:
    (finding,) = bad(check_all(seen(decode__num_gpus=1, dtype="float32")))
    assert finding.what == "the pools ask for 1 GPUs, and 0 are visible"


def write_rdma(sysfs: Path, state: str, layer: str, gid_type: str) -> None:
    port = sysfs / "mlx5_0" / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs" / "types").mkdir(parents=True)
    for name, text in {"state": f"4: {state}", "rate": "100 Gb/sec (2X HDR)", "link_layer": layer}.items():
        (port / name).write_text(text + "\n")
    (port / "gids" / "0").write_text("fe80:0000:0000:0000:1234:56ff:fe78:9abc\n")
    (port / "gids" / "1").write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    (port / "gid_attrs" / "types" / "0").write_text(gid_type + "\n")


def test_rdma_ports_their_state_and_their_gids(tmp_path: Path) -> None:
    write_rdma(tmp_path / "sys", "ACTIVE", "Ethernet", "IB/RoCE v1")
    verbs = tmp_path / "dev"
    verbs.mkdir()
    (verbs / "uverbs0").write_text("")
    rdma = probe_rdma(tmp_path / "sys", verbs)
    (port,) = rdma.ports
    assert (port.name, port.is_active, port.gid_types) == ("mlx5_0:1", True, ("IB/RoCE v1",))
    assert rdma.verbs_usable
    assert [
        "mlx5_0:1 has no RoCE v2 GID" in f.what for f in bad(probed(load_config(None), rdma=lambda: rdma))
    ]


def test_rdma_that_is_down_or_out_of_reach(tmp_path: Path) -> None:
    write_rdma(tmp_path / "down", "DOWN", "InfiniBand", "IB/RoCE v1")
    (down,) = bad(probed(load_config(None), rdma=lambda: probe_rdma(tmp_path / "down", tmp_path)))
    assert down.what == "no RDMA port is up: mlx5_0:1 DOWN"
    write_rdma(tmp_path / "up", "ACTIVE", "InfiniBand", "IB/RoCE v1")
    (closed,) = bad(probed(load_config(None), rdma=lambda: probe_rdma(tmp_path / "up", tmp_path)))
    assert "/dev/infiniband/uverbs* cannot be opened" in closed.what
    assert probe_rdma(tmp_path / "none").ports == ()


def test_memory_is_what_the_container_may_use(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB // 4}\n")
    memory = probe_memory(tmp_path)
    assert memory.total_bytes == GIB
    assert memory.available_bytes <= GIB * 3 // 4
    (tmp_path / "memory.max").write_text("max\n")
    assert probe_memory(tmp_path).total_bytes > GIB


def test_a_model_is_looked_at_without_being_loaded(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny")
    model = probe_model(load_config(None, {"model": str(folder)}))
    assert (model.state, model.path, model.problem) == ("ready", str(folder), "")
    assert model.num_parameters == 1000
    folder = write_folder(tmp_path / "m")
    trained_tokenizer().save(str(folder / "tokenizer.json"))
    config = load_config(None, {"model": str(folder)})
    assert "architecture (none named) is not supported" in probe_model(config).problem
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "truncated" in probe_model(config).problem


def test_a_model_that_is_not_here_yet_is_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    config = load_config(None, {"model": "nobody/nothing"})
    assert probe_model(config).state == "to download"
    assert "the first start downloads it" in probed(config, model=lambda: probe_model(config))[0].what


def test_probes_that_fail_or_hang_are_findings_and_hold_up_nobody() -> None:
    never = threading.Event()

    def refuse() -> None:
        raise StartupError("no such thing")

    facts = run_probes("n0", {"shm": refuse, "memory": never.wait, "clock": lambda: None}, limit_s=0.05)
    never.set()
    assert facts.failures == {"shm": "StartupError: no such thing", "memory": "no answer within 0 s"}
    found = bad(check_all(seen(facts)))
    assert [(f.severity, f.check) for f in found] == [("warning", "shm"), ("warning", "memory")]


def test_probes_that_hang_share_one_limit() -> None:
    """With a limit each, a node where several hang would be taken for one that does not answer."""
    never = threading.Event()
    now_s = iter([0.0, 2000.0, 2000.0])
    hanging = {"memory": never.wait, "shm": never.wait}
    facts = run_probes("n0", hanging, limit_s=1000.0, clock=lambda: next(now_s))
    never.set()
    assert set(facts.failures) == {"memory", "shm"}


def test_every_probe_fills_a_fact_of_this_machine() -> None:
    probes = dict(probes_of(load_config(None)))
    del probes["model"]  # the demo model may not be installed
    assert run_probes("here", probes).failures == {}


LOG = """\
[17.5] [host:7:0]     ucp_context.c:2753 UCX  INFO  Version 1.23.0 (loaded from libucp.so)
[17.6] [host:7:0]   +-------+--------+-------------+----------+
[17.6] [host:7:0]   | agent inter-node cfg#1                  |
[17.6] [host:7:0]   | active message by ucp_am_send* from host memory |
[17.6] [host:7:0]   | Count | Range  | Description | Config   |
[17.6] [host:7:0]   |     9 | 0..inf | short       | tcp/eth0 |
[17.6] [host:7:0]   | agent inter-node cfg#1                  |
[17.6] [host:7:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[17.6] [host:7:0]   | Count | Range  | Description | Config   |
[17.6] [host:7:0]   |     1 | 0..2048 | short | tcp/eth0 |
[17.6] [host:7:0]   |     4 | 2049..inf | zero-copy | 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1 |
"""


def test_the_transport_is_that_of_most_reads() -> None:
    assert read_transport(LOG) == "rc_mlx5/mlx5_0:1 + rc_mlx5/mlx5_1:1"
    assert ucx_version(LOG) == "1.23.0"


def test_a_log_without_the_table_names_no_transport() -> None:
    assert read_transport("") == ""
    assert ucx_version("") == ""
