"""Hosts with everything of their own but the disk: network, processes, home, shared memory, name and sshd.

`ray stop` ends all Ray processes that it sees, UCX moves KV through shared memory where it can, and the
folders of Ray collide: so a host is more than a network namespace here. The disk is shared, as over NFS;
on top of it each host has its own /dev/shm, Ray folder, and home of root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import netns_hosts
import psutil
from netns_hosts import Host, network

REPOSITORY = Path(__file__).parents[2]
RAY_FOLDER = Path("/tmp/ray")  # noqa: S108
SSHD = "/usr/sbin/sshd"
SSH_OPTIONS = (
    "StrictHostKeyChecking=no",
    "UserKnownHostsFile=/dev/null",
    "LogLevel=ERROR",
    "BatchMode=yes",
)
BOOT_S = 10.0
COMMAND_S = 60.0

BOOT = """
set -e
mount --make-rprivate /
hostname {name}
mount -t tmpfs -o size=2g tmpfs /dev/shm
mkdir -p {ray} /run/sshd
mount -t tmpfs -o size=2g tmpfs {ray}
mount --bind {folder}/passwd /etc/passwd
exec {sshd} -D -e -f {folder}/sshd_config
"""
SSHD_CONFIG = """
ListenAddress {address}
HostKey {folder}/hostkey
PidFile none
AuthorizedKeysFile {key}.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """One host that runs; `home` is the home of its root, seen from here."""

    host: Host
    key: Path
    home: Path
    pid: int
    """Of its first process, as this host numbers it."""

    @property
    def address(self) -> str:
        return self.host.address

    def run(self, command: str, timeout_s: float = COMMAND_S) -> str:
        """What a login shell there prints, errors too; fails when the command does."""
        quoted = command.replace("'", "'\\''")
        done = subprocess.run(
            [*ssh(self.key, self.address), f"bash --login -c '{quoted}'"],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def processes(self) -> list[psutil.Process]:
        """All that run there, beside sshd and what it does for us."""
        root = psutil.Process(self.pid)
        namespace = _pid_namespace(self.pid)
        found = [p for p in psutil.process_iter() if p != root and _pid_namespace(p.pid) == namespace]
        return [p for p in found if _name(p) not in ("sshd", "")]

    def named(self, name: str) -> list[psutil.Process]:
        """All processes of that name."""
        return [p for p in self.processes() if _name(p) == name]

    def process(self, name: str) -> psutil.Process:
        """The one process of that name."""
        found = self.named(name)
        assert len(found) == 1, [(p.pid, _name(p)) for p in self.processes()]
        return found[0]


def ssh(key: Path, address: str) -> list[str]:
    options = [word for option in SSH_OPTIONS for word in ("-o", option)]
    return ["ssh", "-i", str(key), *options, f"root@{address}"]


def obstacle() -> str | None:
    """Why there can be no such hosts here; None when there can."""
    tools = {"ip": "iproute2", "ssh": "openssh-client", SSHD: "openssh-server", "rsync": "rsync"}
    tools |= {"unshare": "util-linux"}
    missing = [package for tool, package in tools.items() if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if reason := netns_hosts.obstacle():
        return reason
    probe = ("unshare", "--pid", "--mount", "--uts", "--fork", "--mount-proc", "true")
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"this kernel makes no hosts: {done.stderr.strip()}"


@contextmanager
def machines(names: list[str], folder: Path, variables: Mapping[str, str]) -> Iterator[dict[str, Machine]]:
    """Hosts of these names that answer ssh; their login shells have `variables`. All is gone at the end."""
    key = folder / "id"
    _keygen(key)
    with ExitStack() as stack:
        hosts = stack.enter_context(network(names)).hosts
        running = {
            name: stack.enter_context(_running(host, folder / name, key, variables))
            for name, host in hosts.items()
        }
        for machine in running.values():
            _wait_for_ssh(machine)
        yield running


@contextmanager
def _running(host: Host, folder: Path, key: Path, variables: Mapping[str, str]) -> Iterator[Machine]:
    home = folder / "home"
    home.mkdir(parents=True)
    _keygen(folder / "hostkey")
    (folder / "passwd").write_text(_passwd(home), encoding="utf-8")
    (folder / "sshd_config").write_text(
        SSHD_CONFIG.format(address=host.address, folder=folder, key=key), encoding="utf-8"
    )
    boot = BOOT.format(name=host.name, ray=RAY_FOLDER, folder=folder, sshd=SSHD)
    (folder / "boot").write_text(boot, encoding="utf-8")
    lines = [f'export PATH="{Path(sys.executable).parent}:$PATH"']
    lines += [f'export {name}="{value}"' for name, value in variables.items()]
    (home / ".bash_profile").write_text("\n".join(lines) + "\n", encoding="utf-8")
    unshare = ("unshare", "--pid", "--mount", "--uts", "--fork", "--mount-proc", "--kill-child")
    command = ["ip", "netns", "exec", host.netns, *unshare, "bash", str(folder / "boot")]
    with (folder / "sshd.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        yield Machine(host, key, home, _first_child(process.pid))
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its first process ends with the one that made it, and takes all others along."""
    for child in psutil.Process(process.pid).children():
        child.kill()
    process.kill()
    process.wait(timeout=10)


def _first_child(pid: int) -> int:
    """`ip netns exec` becomes `unshare`, whose only child is the first process of the new host."""
    limit = time.monotonic() + BOOT_S
    while time.monotonic() < limit:
        children: list[psutil.Process] = psutil.Process(pid).children()
        if children:
            number: int = children[0].pid
            return number
        time.sleep(0.02)
    raise AssertionError("the host did not boot")


def _wait_for_ssh(machine: Machine) -> None:
    limit = time.monotonic() + BOOT_S
    command = [*ssh(machine.key, machine.address), "true"]
    while True:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        if done.returncode == 0:
            return
        assert time.monotonic() < limit, f"{machine.host.name} does not answer: {done.stderr}"
        time.sleep(0.1)


def _keygen(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


def _passwd(home: Path) -> str:
    """This host's users, root with another home."""
    lines = Path("/etc/passwd").read_text(encoding="utf-8").splitlines()
    others = [line for line in lines if not line.startswith("root:")]
    return "\n".join([f"root:*:0:0:root:{home}:/bin/bash", *others]) + "\n"


def _pid_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _name(process: psutil.Process) -> str:
    try:
        name: str = process.name()
    except psutil.Error:
        return ""
    return name
