"""What the doctor's tests share: a node with chosen probes, and looking findings up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from weights_samples import trained_tokenizer, write_folder

from cluster.config import ClusterConfig, load_config
from cluster.doctor.doctor import check_all
from cluster.doctor.facts import (
    Clock,
    Gpus,
    Limits,
    Live,
    Memory,
    NodeFacts,
    Rdma,
    RdmaPort,
    Seen,
    Shm,
    Ucx,
)
from cluster.doctor.findings import Finding, Severity
from cluster.doctor.node import run_probes

DEFAULTS = load_config(None)
GIB = 2**30
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}
"""The config.json of a model whose weights nobody loads."""
ACTIVE_PORT = RdmaPort("mlx5_0:1", "ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand", ("IB/RoCE v1",))


def healthy_node(name: str = "n0", **changes: Any) -> NodeFacts:
    """Nothing to complain of; the model and what is installed are not known."""
    node = NodeFacts(
        name=name,
        gpus=Gpus(),
        rdma=Rdma(),
        ucx=Ucx({}, ("eth0", "lo")),
        shm=Shm(8 * GIB, 8 * GIB),
        limits=Limits(None, 65536, 65536),
        memory=Memory(64 * GIB, 32 * GIB),
        clock=Clock(0.0),
    )
    return replace(node, **changes)


def seen(*nodes: NodeFacts, live: Live | None = None, reads: Iterable[Any] = (), **changes: object) -> Seen:
    """`changes` are keys of the configuration, `__` for a dot."""
    config = load_config(None, {key.replace("__", "."): value for key, value in changes.items()})
    return Seen(config, nodes or (healthy_node(),), live or Live(), tuple(reads))


def probed(config: ClusterConfig, **probes: Callable[[], Any]) -> tuple[Finding, ...]:
    """What the checks say of a node where these probes really run."""
    return check_all(Seen(config, (run_probes("n0", probes),)))


def bad(findings: Iterable[Finding]) -> list[Finding]:
    return [f for f in findings if f.severity in {Severity.WARNING, Severity.PROBLEM}]


def the_only(findings: Iterable[Finding], severity: Severity) -> Finding:
    """The one bad finding there is; it says what to do."""
    found = bad(findings)
    assert [f.severity for f in found] == [severity], found
    assert found[0].todo
    return found[0]


def write_model(folder: Path) -> Path:
    """A folder that looks like a model of TINY's size, made without transformers."""
    write_folder(folder, {"model.norm.weight": torch.ones(1000)}, **TINY)
    trained_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
