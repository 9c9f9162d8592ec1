"""Which RDMA devices are there, are they up, and may this process use them?"""

from __future__ import annotations

import os
from pathlib import Path

from cluster.doctor.facts import NodeFacts, Rdma, RdmaPort, Seen
from cluster.doctor.findings import Findings, Topic

SYSFS = Path("/sys/class/infiniband")
VERBS = Path("/dev/infiniband")
CHECK = "rdma"
_NO_GID = frozenset(":0")
"""The characters of a GID that is not set."""


def probe_rdma(sysfs: Path = SYSFS, verbs: Path = VERBS) -> Rdma:
    """Read from the kernel's files; empty where there is no such device."""
    if not sysfs.is_dir():
        return Rdma()
    ports = tuple(
        _read_port(f"{device.name}:{port.name}", port)
        for device in sorted(sysfs.iterdir())
        for port in sorted((device / "ports").glob("*"))
    )
    usable = [os.access(file, os.R_OK | os.W_OK) for file in verbs.glob("uverbs*")]
    return Rdma(ports, bool(usable) and all(usable))


def _read_port(name: str, port: Path) -> RdmaPort:
    gids = [gid for gid in sorted((port / "gids").glob("*")) if not set(_read(gid)) <= _NO_GID]
    kinds = {_read(port / "gid_attrs" / "types" / gid.name) for gid in gids}
    return RdmaPort(
        name=name,
        state=_read(port / "state").rpartition(":")[2].strip(),
        rate=_read(port / "rate"),
        link_layer=_read(port / "link_layer"),
        gid_types=tuple(sorted(kinds - {""})),
    )


def _read(file: Path) -> str:
    """The kernel refuses to read the type of a GID that is not set."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def check_rdma(seen: Seen) -> Findings:
    for node in seen.nodes:
        if node.rdma is not None:
            yield from _check_node(node, node.rdma, others=len(seen.nodes) > 1)


def _check_node(node: NodeFacts, rdma: Rdma, *, others: bool) -> Findings:
    topic = Topic(node.name, CHECK)
    if not rdma.ports:
        yield topic.info("no RDMA device" + (": KV moves between nodes over TCP" if others else ""))
        return
    if not rdma.is_active:
        states = ", ".join(f"{port.name} {port.state}" for port in rdma.ports)
        yield topic.warning(
            f"no RDMA port is up: {states}", "look at cables, switch and `ip link`, or do without"
        )
        return
    if not rdma.verbs_usable:
        yield topic.problem(
            "RDMA devices are there, but /dev/infiniband/uverbs* cannot be opened",
            "give the container the RDMA devices and the capability IPC_LOCK",
        )
    active = [port for port in rdma.ports if port.is_active]
    yield topic.ok("; ".join(f"{port.name} {port.rate}, {port.link_layer}" for port in active))
    for port in active:
        if port.link_layer == "Ethernet" and "RoCE v2" not in port.gid_types:
            yield topic.warning(
                f"{port.name} has no RoCE v2 GID ({', '.join(port.gid_types) or 'none at all'})",
                "give its network interface an IP address, and see UCX_IB_GID_INDEX",
            )
