"""Hosts that are network namespaces, each with one cable to a bridge, which is on the caller's own host.

caller's host: 10.x.y.1 ── bridge ──┬── eth0 10.x.y.2 host 0
                                    ├── eth0 10.x.y.3 host 1 ...
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace, and the caller's end of its cable."""

    name: str
    address: str
    netns: str
    cable: str

    def cut(self) -> None:
        """Pull the cable: nobody is told, packets just get nowhere."""
        _run("ip", "link", "set", self.cable, "down")

    def heal(self) -> None:
        _run("ip", "link", "set", self.cable, "up")

    def throttle(self, mbit_per_s: int) -> None:
        """What it sends gets no faster out."""
        _run("tc", "-n", self.netns, "qdisc", "replace", "dev", "eth0", "root", *_rate(mbit_per_s))

    def unthrottle(self) -> None:
        _run("tc", "-n", self.netns, "qdisc", "del", "dev", "eth0", "root")

    def num_sent_bytes(self) -> int:
        """Since the cable is there; works while it is cut."""
        counter = Path(f"/sys/class/net/{self.cable}/statistics/rx_bytes")
        return int(counter.read_text(encoding="ascii"))


@dataclass(frozen=True, slots=True)
class Network:
    """All hosts, and the caller's own address among them."""

    address: str
    hosts: dict[str, Host]


def obstacle() -> str | None:
    """Why no such hosts can be made here; None when they can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} are not installed (iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"ss{os.getpid()}x"
    made = _try("ip", "netns", "add", probe)
    if made is None:
        made = _try("tc", "-n", probe, "qdisc", "add", "dev", "lo", "root", *_rate(1))
        _run("ip", "netns", "del", probe)
    return None if made is None else f"this kernel makes no hosts of namespaces: {made}"


@contextmanager
def network(names: list[str]) -> Iterator[Network]:
    """Hosts of these names, gone at the end."""
    tag = f"ss{os.getpid() % 100_000}"
    subnet = f"10.213.{os.getpid() % 250}"
    bridge, own = f"{tag}br", f"{subnet}.1"
    hosts = {
        name: Host(name, f"{subnet}.{2 + i}", f"{tag}-{name}", f"{tag}v{i}") for i, name in enumerate(names)
    }
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{own}/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for host in hosts.values():
            _add(host, bridge)
        yield Network(own, hosts)
    finally:
        for host in hosts.values():
            _try("ip", "link", "del", host.cable)
            _try("ip", "netns", "del", host.netns)
        _try("ip", "link", "del", bridge)


def _add(host: Host, bridge: str) -> None:
    _run("ip", "netns", "add", host.netns)
    peer = ("type", "veth", "peer", "name", "eth0", "netns", host.netns)
    _run("ip", "link", "add", host.cable, *peer)
    _run("ip", "link", "set", host.cable, "master", bridge, "up")
    _run("ip", "-n", host.netns, "addr", "add", f"{host.address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _run("ip", "-n", host.netns, "link", "set", device, "up")


def _rate(mbit_per_s: int) -> tuple[str, ...]:
    return ("tbf", "rate", f"{mbit_per_s}mbit", "burst", "64kb", "latency", "200ms")


def _run(*command: str) -> None:
    complaint = _try(*command)
    if complaint is not None:
        raise OSError(f"{' '.join(command)}: {complaint}")


def _try(*command: str) -> str | None:
    """What the command complains about; None when it succeeded."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
